"""Media without content: silence, a grey picture, a grey film, each as long and as large as what it stands for."""

from __future__ import annotations

import numpy as np

from relax_sdk.decoding import SAMPLING_RATE, decode_audio, decode_image, decode_video
from relax_sdk.media import Audio, Image, Media, Video

GREY = 128
FPS = 4.0
"""Frames a second of a film that does not say how many it has."""
SILENT = 1e-3
"""Peak of a sound, of full scale 1, up to which it counts as silence."""
EVEN = 2.0
"""Standard deviation of pixels, of 255, up to which a picture or a film counts as one colour; encoding a film adds noise."""


def blank(part: Media) -> Media:
    """Media of the same kind, length and size that say nothing.

    Raises:
        MediaError: the bytes of `part` cannot be had or decoded.
    """
    if isinstance(part, Audio):
        return Audio.from_array(np.zeros(len(decode_audio(part.bytes())), np.float32), SAMPLING_RATE)
    ref = part.ref
    if isinstance(part, Image):
        return Image.from_array(np.full((ref.height or 1, ref.width or 1, 3), GREY, np.uint8))
    fps = ref.fps or FPS
    frames = max(1, round((ref.duration or 1 / fps) * fps))
    height, width = (max(2, side // 2 * 2) for side in (ref.height or 2, ref.width or 2))  # as encoders want them
    return Video.from_array(np.full((frames, height, width, 3), GREY, np.uint8), fps=fps)


def is_blank(part: Media) -> bool:
    """Whether a sound is silent, or a picture or film of one colour.

    Raises:
        MediaError: the bytes cannot be had or decoded.
    """
    data = part.bytes()
    if isinstance(part, Audio):
        return float(np.abs(decode_audio(data)).max(initial=0.0)) <= SILENT
    pixels = decode_image(data) if isinstance(part, Image) else decode_video(data)[0]
    return float(pixels.reshape(-1, pixels.shape[-1]).std(axis=0).max()) <= EVEN
