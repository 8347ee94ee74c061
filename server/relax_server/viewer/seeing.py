"""A process that makes files of what a model saw: media are decoded, and torch is loaded, here and not in the server.

`python -m relax_server.viewer.seeing MODEL OUT SECONDS` reads one item a line and writes, for each, `OUT/<sha256>.json` last.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

from relax_sdk.decoding import decode_audio, decode_image, decode_video
from relax_sdk.errors import RelaxError
from relax_sdk.media import MediaRef
from relax_server.models.families import media_rule
from relax_server.models.media_features import FeatureExtractor, resize
from relax_server.models.processor_config import ProcessorConfig

MEMORY = 8 << 30
"""Bytes of address space that it may take; torch reserves some that it does not use."""
FRAMES = 64
"""Frames of a film that are shown; of more, those that are evenly spread."""


def main(model: Path, out: Path, seconds: int) -> None:
    """Make the files of all items that come, within seconds of processor time for each."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if most == resource.RLIM_INFINITY else min(MEMORY, most), most))
    for line in sys.stdin:
        item = json.loads(line)
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            extractor = FeatureExtractor(ProcessorConfig.load(model), media_rule(model))
            ref = MediaRef(item["sha256"], item["mime"], item["size"])
            told = see(extractor, Path(item["path"]), ref, out / ref.sha256)
        except (RelaxError, OSError, MemoryError) as error:
            told = {"error": str(error) or type(error).__name__}
        (out / f"{item['sha256']}.json").write_text(json.dumps(told))


def see(extractor: FeatureExtractor, path: Path, ref: MediaRef, out: Path) -> dict[str, Any]:
    """What the model saw of one item, told with the number of its placeholder tokens; its files are written beside `out`.

    Raises:
        MediaError: it cannot be decoded, or the model does not take it.
        OSError: it cannot be read, or the files cannot be written.
    """
    data, config, kind = path.read_bytes(), extractor.config, ref.kind
    made = extractor.outline(data, ref)
    tokens = {"tokens": made.n_tokens}
    if made.grid is None:
        wave = decode_audio(data, config.audio.sampling_rate)
        wave = np.pad(wave, (0, max(0, config.audio.min_samples - len(wave))))
        import soundfile

        subtype = "PCM_16" if np.abs(wave).max() <= 1.0 else "FLOAT"
        soundfile.write(out.with_suffix(".wav"), wave, config.audio.sampling_rate, subtype=subtype, format="WAV")
        shape = [config.audio.feature_size, len(wave) // config.audio.hop_length]
        told = {"sampling_rate": config.audio.sampling_rate, "samples": len(wave), "wave": f"{out.name}.wav"}
        return {"kind": kind, **told, **tokens, "features": {"shape": shape}}
    if kind == "image":
        frames, fps, settings = decode_image(data)[None], None, config.image
    else:
        frames, fps = decode_video(data, sample=config.sampling)
        settings = config.video
    _, rows, columns = made.grid
    seen = resize(frames, rows * settings.patch, columns * settings.patch, settings)
    shown = np.unique(np.linspace(0, len(seen) - 1, min(FRAMES, len(seen))).round().astype(int)).tolist()
    names = [_png(seen[index], out.with_name(f"{out.name}-{number}.png")) for number, index in enumerate(shown)]
    told = {"kind": kind, "height": seen.shape[1], "width": seen.shape[2], "frames": names, **tokens}
    if fps is not None:
        told |= {"fps": fps, "times": [index / fps for index in shown], "n_frames": len(seen)}
    return told


def _png(pixels: np.ndarray, path: Path) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    path.write_bytes(buffer.getvalue())
    return path.name


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
