"""Decoding: pixels and samples out of encoded bytes. A decoder is opened, used and closed in one call: a shared one crashes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from relax_sdk.errors import MediaError
from relax_sdk.truncation import check_complete

if TYPE_CHECKING:
    import av

SAMPLING_RATE = 16_000
"""Every sound is decoded to this rate, in Hz, mono."""


def decode_image(data: bytes) -> np.ndarray:
    """Pixels as uint8 [height, width, 3].

    Raises:
        MediaError: damaged or truncated.
    """
    from PIL import Image as PILImage

    try:
        with PILImage.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))
    except Exception as error:
        raise MediaError(f"damaged image ({error})") from error


def decode_audio(data: bytes, sampling_rate: int = SAMPLING_RATE) -> np.ndarray:
    """Samples as float32 [n], mono, at `sampling_rate` Hz.

    Raises:
        MediaError: damaged, empty, shorter than its header says, or not finite.
    """
    import soundfile

    check_complete(data)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            stated, rate = sound.frames, sound.samplerate
            wave = sound.read(dtype="float32", always_2d=True)
    except Exception as error:
        raise MediaError(f"damaged sound ({error})") from error
    if len(wave) == 0:
        raise MediaError("the sound holds no samples")
    if len(wave) < stated * 0.99:
        raise MediaError(f"truncated sound: {len(wave)} of {stated} samples could be read")
    if not np.isfinite(wave).all():
        raise MediaError(f"the sound holds {int((~np.isfinite(wave)).sum())} samples that are NaN or infinite")
    mono = wave.mean(axis=1) if wave.shape[1] > 1 else wave[:, 0]
    if rate != sampling_rate:
        import soxr

        mono = soxr.resample(mono, rate, sampling_rate)
    return np.ascontiguousarray(mono, dtype=np.float32)


def decode_video(data: bytes, max_frames: int = 16) -> tuple[np.ndarray, float]:
    """Frames spread evenly over the video, first and last among them.

    Returns:
        uint8 [n, height, width, 3] with n ≤ max_frames, and the frames per second of the returned frames.

    Raises:
        MediaError: damaged or truncated.
    """
    check_complete(data)
    try:
        frames, count, fps = _decode_decord(data, max_frames)
    except Exception:
        frames, count, fps = _decode_pyav(data, max_frames)
    return frames, (fps or 1.0) * len(frames) / count


def _spread(count: int, max_frames: int) -> np.ndarray:
    return np.linspace(0, count - 1, min(count, max_frames)).round().astype(int)


def _decode_decord(data: bytes, max_frames: int) -> tuple[np.ndarray, int, float]:
    import decord

    reader = decord.VideoReader(io.BytesIO(data), num_threads=1)
    count = len(reader)
    return reader.get_batch(_spread(count, max_frames)).asnumpy(), count, float(reader.get_avg_fps())


def _decode_pyav(data: bytes, max_frames: int) -> tuple[np.ndarray, int, float]:
    """The fallback for containers that decord cannot open, and the one whose errors are told."""
    import av

    def frames() -> Iterator[av.VideoFrame]:
        with av.open(io.BytesIO(data), "r") as container:
            stream = container.streams.video[0]
            stream.thread_count = 1
            yield from container.decode(stream)

    try:
        with av.open(io.BytesIO(data), "r") as container:
            if not container.streams.video:
                raise MediaError("the file holds no video stream")
            stated, fps = container.streams.video[0].frames, float(container.streams.video[0].average_rate or 0)
        # Only the wanted frames are held: all of a long video would not fit in memory. WebM does not state their number.
        count = stated or sum(1 for _ in frames())
        wanted, found, kept = set(_spread(count, max_frames).tolist()), 0, []
        for frame in frames():
            if found in wanted:
                kept.append(frame.to_ndarray(format="rgb24"))
            found += 1
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"damaged video ({error})") from error
    if not found:
        raise MediaError("no frame of the video could be decoded")
    if found < count:
        raise MediaError(f"truncated video: {found} of {count} frames could be decoded")
    return np.stack(kept), count, fps
