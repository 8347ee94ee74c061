"""What transformers' own processors make of media files; imports nothing of Relax Gym.

    .venv-processors/bin/python benchmarks/peers/processors.py MODEL_FOLDER FILES_FOLDER OUT.npz [--images pil]

A file's name begins with its kind: `image-…`, `audio-…`, `video-…`. OUT.npz holds `NAME/features` and `NAME/tokens`. Films need
torchvision, and so do images without `--images pil`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def import_torchvision() -> None:
    """Import it even where its compiled part does not fit this torch: two operators that its Python part names are declared."""
    try:
        import torchvision
    except RuntimeError:
        import torch

        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_library"] = library  # its operators go when it does
        import torchvision  # noqa: F401


def image_of(file: Path) -> Any:
    """A Pillow image, upright; 16-bit grey by its high byte, as Pillow's own conversion would cut it off to white."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(Image.open(file))
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if image.mode.startswith("I;16") else image


def wave_of(file: Path, rate: int) -> np.ndarray:
    """Samples as float32 [n], mono."""
    import soundfile
    import soxr

    wave, stored = soundfile.read(file, dtype="float32", always_2d=True)
    mono = wave.mean(axis=1)
    return mono if stored == rate else soxr.resample(mono, stored, rate).astype(np.float32)


def frames_of(file: Path) -> tuple[np.ndarray, float]:
    """All frames as uint8 [n, height, width, 3], and their number per second."""
    import av

    with av.open(str(file)) as container:
        rate = float(container.streams.video[0].average_rate or 0)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]), rate


class Processors:
    """The processors that a model folder names.

    Args:
        folder: of the model.
        images: `torchvision` or `pil`.
    """

    def __init__(self, folder: Path, images: str) -> None:
        if images == "torchvision":
            import_torchvision()
        from transformers import AutoFeatureExtractor, AutoImageProcessor

        named = [json.loads(f.read_text()).get("processor_class") for f in folder.glob("*processor_config.json")]
        self.whole: Any = None
        self.video: Any = None
        if images == "pil":
            pass  # films cannot be prepared
        elif "Qwen3OmniMoeProcessor" in named:
            from transformers import Qwen3OmniMoeProcessor

            self.whole = Qwen3OmniMoeProcessor.from_pretrained(folder)
        else:
            from transformers import AutoVideoProcessor

            self.video = AutoVideoProcessor.from_pretrained(folder)
        own = folder / "processor_config.json"
        self.videos_kwargs = json.loads(own.read_text()).get("videos_kwargs", {}) if own.exists() else {}
        self.image: Any = AutoImageProcessor.from_pretrained(folder, backend=images)
        self.audio: Any = AutoFeatureExtractor.from_pretrained(folder)

    def __call__(self, file: Path) -> tuple[np.ndarray, int]:
        """Features and number of tokens of one file."""
        kind = file.name.split("-")[0]
        if kind == "image":
            out = self.image(images=[image_of(file)], return_tensors="np")
            return out["pixel_values"], int(np.prod(out["image_grid_thw"])) // self.image.merge_size**2
        if kind == "audio":
            return self._audio(file)
        return self._video(file)

    def _audio(self, file: Path) -> tuple[np.ndarray, int]:
        from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

        rate = self.audio.sampling_rate
        settings: dict[str, Any] = dict(padding=True, truncation=False, return_attention_mask=True, return_tensors="np")
        out = self.audio(wave_of(file, rate), sampling_rate=rate, **settings)
        return out["input_features"][0], int(_get_feat_extract_output_lengths(out["attention_mask"].sum(-1))[0])

    def _video(self, file: Path) -> tuple[np.ndarray, int]:
        from transformers.video_utils import VideoMetadata

        frames, fps = frames_of(file)
        metadata = VideoMetadata(total_num_frames=len(frames), fps=fps, duration=len(frames) / fps)
        settings: dict[str, Any] = dict(video_metadata=[metadata], return_tensors="pt", **self.videos_kwargs)
        if len(frames) < 2:
            settings["do_sample_frames"] = False  # its sampling divides by zero
        if self.whole is None:
            out = self.video(videos=[frames], **settings)
            tokens = int(out["video_grid_thw"].prod()) // self.video.merge_size**2
        else:
            out = self.whole(text=[self.whole.video_token], videos=[frames], **settings)
            tokens = int((out["input_ids"] == self.whole.video_token_id).sum())
        return out["pixel_values_videos"].numpy(), tokens


def table(folder: Path, files: Iterable[Path], images: str) -> dict[str, np.ndarray]:
    """`NAME/features` and `NAME/tokens` of every file."""
    processors = Processors(folder, images)
    out: dict[str, np.ndarray] = {}
    for file in files:
        features, tokens = processors(file)
        out[f"{file.name}/features"], out[f"{file.name}/tokens"] = features, np.asarray(tokens)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("files", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--images", choices=["torchvision", "pil"], default="torchvision")
    args = parser.parse_args()
    np.savez(args.out, **table(args.model, sorted(args.files.iterdir()), args.images))


if __name__ == "__main__":
    main()
