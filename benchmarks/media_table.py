"""Media features beside transformers' own processors, on files of all kinds and model folders with different settings.

    make .venv-processors
    python -m benchmarks.media_table --python .venv-processors/bin/python

Films, and images by torchvision's filter, need an environment with torchvision; without `--python` only images by Pillow's
filter and sounds are compared. The bars: features within 1e-5, numbers of tokens equal.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from relax_server.models.catalog import resolve_model
from relax_server.models.families.qwen3_omni import QWEN3_OMNI
from relax_server.models.media_features import FeatureExtractor, Kind
from relax_server.models.processor_config import ProcessorConfig

from benchmarks.media_files import make_files
from benchmarks.peers import processors

BAR = 1e-5
SCRIPT = Path(processors.__file__)

HUB: dict[str, Any] = dict(
    processor_class="Qwen3OmniMoeProcessor",
    image_processor_type="Qwen2VLImageProcessor",
    feature_extractor_type="WhisperFeatureExtractor",
    min_pixels=3136,
    max_pixels=12_845_056,
    image_mean=[0.5, 0.5, 0.5],
    image_std=[0.5, 0.5, 0.5],
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    feature_size=128,
    hop_length=160,
    n_fft=400,
    chunk_length=300,
    sampling_rate=16_000,
    dither=0.0,
    padding_value=0.0,
    return_attention_mask=True,
)
"""As Qwen3-Omni's folders on the hub have it: films are not sampled, and the size of their frames is the class's."""

NESTED: dict[str, Any] = dict(
    image_processor=dict(
        image_processor_type="Qwen2VLImageProcessor",
        size=dict(shortest_edge=4 * 28 * 28, longest_edge=64 * 28 * 28),
        patch_size=14,
        resample=2,
    ),
    video_processor=dict(
        video_processor_type="Qwen2VLVideoProcessor",
        size=dict(shortest_edge=2 * 28 * 28, longest_edge=64 * 28 * 28),
        patch_size=14,
        do_sample_frames=True,
        fps=5,
        max_frames=6,
        resample=2,
        do_normalize=False,
        cap_pixels_per_frame=True,
        max_video_tokens=40,
    ),
    feature_extractor=dict(feature_extractor_type="WhisperFeatureExtractor", feature_size=80, hop_length=200),
)
"""As transformers writes it since version 5, with other settings throughout: other filter, means, sampling and limits."""

COUNTED: dict[str, Any] = dict(
    processor_class="Qwen3OmniMoeProcessor",
    image_processor=HUB,
    feature_extractor=HUB,
    video_processor=dict(
        video_processor_type="Qwen2VLVideoProcessor", patch_size=16, image_mean=[0.5, 0.4, 0.3], image_std=[0.3, 0.4, 0.5]
    ),
    videos_kwargs=dict(do_sample_frames=True, num_frames=2, size=dict(shortest_edge=1024, longest_edge=20_480)),
)
"""A number of frames in place of frames per second, as arguments that a caller would give."""


def make_folders(root: Path) -> dict[str, Path]:
    """Model folders without weights whose processors differ, by name."""
    tiny = resolve_model("relax/tiny-omni")
    own = ("preprocessor_config.json", "video_preprocessor_config.json")
    out = {"tiny": tiny}
    for name, file, settings in (
        ("hub", "preprocessor_config.json", HUB),
        ("nested", "processor_config.json", NESTED),
        ("counted", "processor_config.json", COUNTED),
    ):
        out[name] = root / name
        shutil.copytree(tiny, out[name], ignore=shutil.ignore_patterns("*.safetensors", *own))
        (out[name] / file).write_text(json.dumps(settings))
    return out


def with_pillow(folder: Path, copy: Path) -> Path:
    """The same folder with Pillow's filter for images."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in copy.glob("*processor_config.json"):
        file.write_text(file.read_text().replace('"Qwen2VLImageProcessor"', '"Qwen2VLImageProcessorPil"'))
    return copy


def reference(python: str, folder: Path, files: Path, images: str = "torchvision") -> dict[str, np.ndarray]:
    """What transformers makes of all files in another environment: `NAME/features` and `NAME/tokens`.

    Raises:
        RuntimeError: its program failed; the end of what it said is in the message.
    """
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "reference.npz"
        command = [python, str(SCRIPT), str(folder), str(files), str(out), "--images", images]
        settings = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=settings)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        with np.load(out) as found:
            return dict(found)


def compare(folder: Path, files: Sequence[Path], theirs: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """One row a file: tokens here and there, and the largest difference of features (infinite where shapes differ)."""
    extract = FeatureExtractor(ProcessorConfig.load(folder), QWEN3_OMNI.media)
    rows: list[dict[str, Any]] = []
    for file in files:
        kind: Kind = file.name.split("-")[0]  # type: ignore[assignment]
        found = extract(file.read_bytes(), kind)
        wanted = theirs[f"{file.name}/features"]
        difference = float(np.abs(found.tensor - wanted).max()) if found.tensor.shape == wanted.shape else float("inf")
        tokens = int(theirs[f"{file.name}/tokens"])
        rows.append({"file": file.name, "kind": kind, "tokens": found.n_tokens, "HF tokens": tokens, "max": difference})
    return rows


def failures(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that miss a bar."""
    return [row for row in rows if row["tokens"] != row["HF tokens"] or not row["max"] <= BAR]


def measure(python: str | None, root: Path) -> list[dict[str, Any]]:
    """Rows by folder and kind: files, files whose numbers of tokens differ, and the largest difference of features."""
    files = make_files(root / "files")
    still = [file for file in files if not file.name.startswith("video-")]
    out: list[dict[str, Any]] = []
    for name, folder in make_folders(root / "folders").items():
        if python is not None:
            rows = compare(folder, files, reference(python, folder, root / "files"))
        else:
            folder = with_pillow(folder, root / "pillow" / name)
            rows = compare(folder, still, processors.table(folder, still, "pil"))
        for kind in dict.fromkeys(row["kind"] for row in rows):
            ours = [row for row in rows if row["kind"] == kind]
            wrong = sum(row["tokens"] != row["HF tokens"] for row in ours)
            worst = max(row["max"] for row in ours)
            row = {"folder": name, "kind": kind, "files": len(ours), "other tokens": wrong, "worst difference": worst}
            out.append(row | {"tokens": sum(row["tokens"] for row in ours)})
    return out


def main() -> None:
    from benchmarks.report import table

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="of an environment with torchvision")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        print(table(measure(args.python, Path(temporary))))


if __name__ == "__main__":
    main()
