"""Pixels and samples out of encoded bytes. A decoder is opened, used and closed in one call: a shared one crashes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from relax_sdk.decord_import import import_decord
from relax_sdk.errors import MediaError
from relax_sdk.films import open_film
from relax_sdk.media_formats import FORMATS, SOUND_ENCODINGS, MediaFormat, sniff
from relax_sdk.media_limits import LIMITS, MediaLimits
from relax_sdk.truncation import check_complete

if TYPE_CHECKING:
    import av
    from PIL import Image as PILImage
    from soundfile import SoundFile

SAMPLING_RATE = 16_000
"""Every sound is decoded to this rate, in Hz, mono."""

MAX_AMPLITUDE = 16.0
"""A sample of full scale is 1.0. Mixed sounds go a little beyond; a sample beyond this was never divided by its full scale."""

MAX_FRAME_BYTES = 4 * 2**30
"""Bytes that the decoded frames of one film may take."""

FEW_FRAMES = 64
"""So many frames of any size that is allowed are within `MAX_FRAME_BYTES`; the size of a frame then need not be known."""

DECORD = ("mov", "matroska")
"""Demuxers that decord is given; it cannot open GIF, and damaged AVI makes it crash the process."""

BLOCK_VALUES = 2**24
"""Samples, of all channels together, that are read at a time: 64 MiB."""

FrameSampler = Callable[[int, float], Sequence[int]]
"""Chooses frames of a film: from their number and the frames per second (0: not stated) to ascending indices."""


@contextmanager
def open_image(data: bytes, limits: MediaLimits = LIMITS) -> Iterator[PILImage.Image]:
    """An image whose pixels are not read yet, and are within the limits.

    Pillow is let try no other format than the one that the bytes begin with.

    Raises:
        MediaError: of a format that is not taken, too large, or with pixels that have no stated range.
    """
    from PIL import Image as PILImage

    with PILImage.open(io.BytesIO(data), formats=(sniff(data, "image").decoder,)) as image:
        check_mode(image.mode)
        limits.check_pixels("image", *image.size)
        yield image


def decode_image(data: bytes) -> np.ndarray:
    """A picture as a model sees it: upright (EXIF orientation), on white where it is transparent, the first frame of several.

    Transparency and orientation are treated as in `convert_to_rgb` and `load_image` of transformers. Of 16-bit grey the high
    byte is taken, as libpng and browsers do; Pillow's own conversion would cut everything above 255 off to white.

    Returns:
        Pixels as uint8 [height, width, 3].

    Raises:
        MediaError: of a format that is not taken, too large, damaged, truncated, or with pixels that have no stated range.
    """
    from PIL import ImageOps

    try:
        with open_image(data) as image:
            ImageOps.exif_transpose(image, in_place=True)
            return np.asarray(_on_white(_eight_bits(image)))
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"damaged image ({error})") from error


def check_mode(mode: str) -> None:
    """Refuse Pillow modes whose pixels have no stated range.

    Raises:
        MediaError: 32-bit integers or floats.
    """
    if mode in ("I", "F"):
        kind = "integers" if mode == "I" else "floats"
        raise MediaError(
            f"the image has 32-bit {kind} as pixels, whose range no header states; scale them to 8 bits: "
            "Image.from_array(uint8 [height, width])"
        )


def _eight_bits(image: PILImage.Image) -> PILImage.Image:
    """16-bit grey as 8-bit grey; every other image as it is."""
    if not image.mode.startswith("I;16"):
        return image
    from PIL import Image as PILImage

    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        grey[values == clear] = 255
    return PILImage.fromarray(grey)


def _on_white(image: PILImage.Image) -> PILImage.Image:
    from PIL import Image as PILImage

    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    colours = image.convert("RGBA")
    white = PILImage.new("RGBA", colours.size, (255, 255, 255, 255))
    return PILImage.alpha_composite(white, colours).convert("RGB")


@contextmanager
def open_sound(data: bytes, limits: MediaLimits = LIMITS) -> Iterator[tuple[MediaFormat, SoundFile]]:
    """A sound whose samples are not read yet, and are within the limits.

    Raises:
        MediaError: of a format or an encoding that is not taken, or too long.
    """
    import soundfile

    sniff(data, "audio")  # libsndfile would try many more, and reads on behind an ID3 tag
    with soundfile.SoundFile(io.BytesIO(data)) as sound:
        name = {"WAVEX": "WAV"}.get(sound.format, sound.format)
        format = next((format for format in FORMATS if format.kind == "audio" and format.decoder == name), None)
        if format is None or sound.subtype not in SOUND_ENCODINGS:
            what = f"a sound of format {sound.format} with samples as {sound.subtype}"
            raise MediaError(f"{what} is not taken; write it as WAV, FLAC, Ogg or MP3")
        limits.check_sound(sound.frames, sound.channels, sound.samplerate)
        yield format, sound


def decode_audio(data: bytes, sampling_rate: int = SAMPLING_RATE) -> np.ndarray:
    """Samples as float32 [n], mono, at `sampling_rate` Hz.

    Raises:
        MediaError: of a format that is not taken, damaged, empty, too long, shorter than its header says, not finite, or far
            beyond full scale.
    """
    check_complete(data)
    try:
        with open_sound(data) as (_, sound):
            stated, rate = sound.frames, sound.samplerate
            mono = _read_mono(sound)
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"damaged sound ({error})") from error
    if len(mono) == 0:
        raise MediaError("the sound holds no samples")
    if len(mono) < stated * 0.99:
        raise MediaError(f"truncated sound: {len(mono)} of {stated} samples could be read")
    if rate != sampling_rate:
        import soxr

        mono = soxr.resample(mono, rate, sampling_rate)
    return np.ascontiguousarray(mono, dtype=np.float32)


def _read_mono(sound: SoundFile) -> np.ndarray:
    """The mean of all channels, float32 [n]; the channels themselves are held only in blocks.

    Raises:
        MediaError: samples that are not finite, or far beyond full scale.
    """
    mono, n, wrong, peak = np.empty(sound.frames, np.float32), 0, 0, 0.0
    while len(block := sound.read(max(1, BLOCK_VALUES // sound.channels), dtype="float32", always_2d=True)):
        finite = np.isfinite(block)
        wrong += block.size - int(np.count_nonzero(finite))
        peak = max(peak, float(np.abs(block).max(where=finite, initial=0.0)))
        mono[n : n + len(block)] = block.mean(axis=1) if block.shape[1] > 1 else block[:, 0]
        n += len(block)
    if wrong:
        raise MediaError(f"the sound holds {wrong} samples that are NaN or infinite")
    check_peak(peak)
    return mono[:n]


def check_peak(peak: float) -> None:
    """Refuse samples that were never scaled to floats of full scale 1.0.

    Args:
        peak: greatest absolute value of a sample.

    Raises:
        MediaError: it is beyond `MAX_AMPLITUDE`.
    """
    if peak > MAX_AMPLITUDE:
        raise MediaError(
            f"the samples reach {peak:g}, where full scale is 1.0; divide them by their full scale (32768 for 16-bit integers)"
        )


def _evenly(most: int) -> FrameSampler:
    """Takes at most `most` frames, spread over the whole film."""

    def sample(count: int, fps: float) -> Sequence[int]:
        return np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()

    return sample


def decode_video(data: bytes, max_frames: int = 16, sample: FrameSampler | None = None) -> tuple[np.ndarray, float]:
    """Frames of a film; a soundtrack is not read.

    Args:
        data: the encoded file.
        max_frames: without `sample`, at most so many are spread evenly over the film, first and last among them.
        sample: chooses the frames.

    Returns:
        uint8 [n, height, width, 3], and the frames per second of the returned frames.

    Raises:
        MediaError: of a format that is not taken, damaged or truncated, or `sample` refuses the film.
    """
    film = sniff(data, "video")  # decord takes whatever its FFmpeg guesses
    check_complete(data)
    if sample is None:
        sample = _evenly(max_frames)
    try:
        frames, count, fps = _decode_decord(data, sample) if film.decoder in DECORD else _decode_pyav(data, sample)
    except MediaError:
        raise
    except Exception:
        frames, count, fps = _decode_pyav(data, sample)
    return frames, (fps or 1.0) * len(frames) / count


def _decode_decord(data: bytes, sample: FrameSampler) -> tuple[np.ndarray, int, float]:
    decord = import_decord()

    reader = decord.VideoReader(io.BytesIO(data), num_threads=1)
    count, fps = len(reader), float(reader.get_avg_fps())
    if not count:
        raise EOFError("no frames")  # for PyAV to look at
    indices = sample(count, fps)
    if len(indices) > FEW_FRAMES:
        _check_size(len(indices), *reader[0].shape[:2])
    return reader.get_batch(indices).asnumpy(), count, fps


def _decode_pyav(data: bytes, sample: FrameSampler) -> tuple[np.ndarray, int, float]:
    """The fallback for containers that decord cannot open, and the one whose errors are told."""
    size, count, fps = count_frames(data)
    try:
        indices = sample(count, fps)
        _check_size(len(indices), *size)
        wanted, found, kept = set(indices), 0, []
        for frame in _frames(data):  # only the wanted ones are held: all of a long video would not fit in memory
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


def _frames(data: bytes) -> Iterator[av.VideoFrame]:
    with open_film(data, LIMITS) as (container, stream):
        yield from container.decode(stream)


def count_frames(data: bytes) -> tuple[tuple[int, int], int, float]:
    """Height and width of a film's frames, their number and frames per second (0: not stated), as PyAV tells them.

    Raises:
        MediaError: damaged, or without a frame.
    """
    try:
        with open_film(data, LIMITS) as (_, stream):
            stated, fps = stream.frames, float(stream.average_rate or 0)
            size = stream.codec_context.height, stream.codec_context.width
        count = stated or sum(1 for _ in _frames(data))  # WebM does not state it
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(f"damaged video ({error})") from error
    if not count:
        raise MediaError("no frame of the video could be decoded")
    return size, count, fps


def _check_size(n: int, height: int, width: int) -> None:
    """Refuse to hold more than `MAX_FRAME_BYTES` of frames at once."""
    wanted = n * height * width * 3
    if wanted > MAX_FRAME_BYTES:
        raise MediaError(
            f"{n} frames of {width}x{height} pixels would take {wanted / 2**30:.1f} GiB; the limit is "
            f"{MAX_FRAME_BYTES / 2**30:g} GiB: take fewer frames (fps or num_frames in the model folder's "
            "video_preprocessor_config.json) or make the film smaller"
        )
