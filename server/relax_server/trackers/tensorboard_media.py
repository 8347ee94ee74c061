"""Images, sounds and films of sample answers as TensorBoard summaries."""

from __future__ import annotations

import io
from typing import Any

import soundfile
from PIL import Image as PILImage
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from relax_sdk.decoding import decode_audio, decode_image, decode_video
from relax_sdk.media import SAMPLING_RATE
from relax_server.trackers.samples import SampleMedia

ITEM_BYTES = 1 << 20
"""A larger item is left out."""
IMAGES = ("image/png", "image/jpeg", "image/gif")
"""Formats that TensorBoard shows; other images become PNG."""
SOUNDS = ("audio/wav", "audio/x-wav", "audio/wave")
"""Formats that TensorBoard plays; other sounds become WAV of 16 kHz, as the model hears them."""
FRAMES = 16
"""Frames of a film, which TensorBoard shows as an animation."""


def summary(tag: str, media: SampleMedia) -> Any | None:
    """One item as a summary of TensorBoard.

    Args:
        tag: the name under which it is shown.
        media: the item.

    Returns:
        A `Summary.Value`: an image, a sound, or a film as an animated image; None where it is larger than `ITEM_BYTES`.

    Raises:
        MediaError: it cannot be decoded.
        OSError: it cannot be read.
    """
    data = media.path.read_bytes()
    if media.ref.kind == "audio":
        value = _sound(tag, data, media)
        shown = value.audio.encoded_audio_string
    else:
        value = _image(tag, data, media) if media.ref.kind == "image" else _film(tag, data)
        shown = value.image.encoded_image_string
    return value if len(shown) <= ITEM_BYTES else None


def _sound(tag: str, data: bytes, media: SampleMedia) -> Any:
    if media.ref.mime not in SOUNDS:
        wave = decode_audio(data)
        file = io.BytesIO()
        soundfile.write(file, wave, SAMPLING_RATE, format="WAV", subtype="PCM_16")
        data = file.getvalue()
    with soundfile.SoundFile(io.BytesIO(data)) as sound:
        facts = dict(sample_rate=sound.samplerate, num_channels=sound.channels, length_frames=sound.frames)
    return Summary.Value(tag=tag, audio=Summary.Audio(**facts, encoded_audio_string=data, content_type="audio/wav"))


def _image(tag: str, data: bytes, media: SampleMedia) -> Any:
    if media.ref.mime not in IMAGES:
        file = io.BytesIO()
        PILImage.fromarray(decode_image(data)).save(file, "PNG")
        data = file.getvalue()
    with PILImage.open(io.BytesIO(data)) as image:
        width, height = image.size
    return Summary.Value(tag=tag, image=Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data))


def _film(tag: str, data: bytes) -> Any:
    frames, fps = decode_video(data, FRAMES)
    pictures = [PILImage.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    lasts = round(1000 / fps) if fps > 0 else 250
    pictures[0].save(file, "GIF", save_all=True, append_images=pictures[1:], duration=lasts, loop=0)
    height, width = frames.shape[1:3]
    return Summary.Value(
        tag=tag, image=Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=file.getvalue())
    )
