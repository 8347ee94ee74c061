"""What decoding a sound or a film would give, without holding it: the number of samples, the number and size of frames."""

from __future__ import annotations

import io

from relax_sdk.decoding import DECORD, SAMPLING_RATE, FrameSampler, count_frames, open_sound
from relax_sdk.decord_import import import_decord
from relax_sdk.errors import MediaError
from relax_sdk.media_formats import sniff

BLOCK_VALUES = 2**20
"""Samples, of all channels together, that are read at a time: 4 MiB."""


def sound_length(data: bytes, sampling_rate: int = SAMPLING_RATE) -> int:
    """Number of samples that `decode_audio` gives; all are decoded, as some formats do not state it, a few at a time.

    Raises:
        MediaError: of a format that is not taken, damaged, empty or too long.
    """
    try:
        with open_sound(data) as (_, sound):
            n, rate = 0, sound.samplerate
            while len(block := sound.read(max(1, BLOCK_VALUES // sound.channels), dtype="float32", always_2d=True)):
                n += len(block)
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"damaged sound ({error})") from error
    if n == 0:
        raise MediaError("the sound holds no samples")
    return (2 * n * sampling_rate + rate) // (2 * rate)  # as soxr rounds


def film_size(data: bytes, sample: FrameSampler) -> tuple[int, int, int, float]:
    """Number, height and width of the frames that `decode_video` gives, and their frames per second; one is decoded.

    Args:
        data: the encoded file.
        sample: chooses the frames.

    Raises:
        MediaError: of a format that is not taken, damaged, or `sample` refuses the film.
    """
    film = sniff(data, "video")
    try:
        found = _by_decord(data, sample) if film.decoder in DECORD else None
    except MediaError:
        raise
    except Exception:
        found = None
    n, size, count, fps = found or _by_pyav(data, sample)
    return n, *size, (fps or 1.0) * n / count


def _by_decord(data: bytes, sample: FrameSampler) -> tuple[int, tuple[int, int], int, float] | None:
    decord = import_decord()

    reader = decord.VideoReader(io.BytesIO(data), num_threads=1)
    count, fps = len(reader), float(reader.get_avg_fps())
    if not count:
        return None
    height, width = reader[0].shape[:2]
    return len(sample(count, fps)), (height, width), count, fps


def _by_pyav(data: bytes, sample: FrameSampler) -> tuple[int, tuple[int, int], int, float]:
    size, count, fps = count_frames(data)
    return len(sample(count, fps)), size, count, fps
