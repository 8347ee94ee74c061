"""Pictures, sounds and films of all kinds, made on the spot: what a processor is compared with transformers' own on.

A file's name begins with its kind: `image-…`, `audio-…`, `video-…`.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np


def make_files(folder: Path, seed: int = 0) -> list[Path]:
    """Write all files.

    Returns:
        53 paths, ascending.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for name, data in (_images(rng) | _sounds(rng) | _films(rng)).items():
        (folder / name).write_bytes(data)
    return sorted(folder.iterdir())


def _scene(rng: np.random.Generator, height: int, width: int, channels: int = 3) -> np.ndarray:
    """Slopes, edges and noise: uint8 [height, width, channels]."""
    rows, columns = np.mgrid[:height, :width]
    slopes = np.stack([rows * (i + 1) + columns * (3 - i) for i in range(channels)], -1)
    edges = 60 * ((rows // 7 + columns // 5) % 2)[..., None]
    return ((slopes + edges + rng.integers(0, 40, slopes.shape)) % 256).astype(np.uint8)


# --------------------------------------------------------------------------------------------------------------- images


def _images(rng: np.random.Generator) -> dict[str, bytes]:
    from PIL import Image

    def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        image.save(buffer, format=format, **options)
        return buffer.getvalue()

    def picture(height: int, width: int, channels: int = 3) -> Image.Image:
        return Image.fromarray(_scene(rng, height, width, channels))

    def turned(orientation: int) -> bytes:
        exif = Image.Exif()
        exif[0x0112] = orientation
        return encoded(picture(70, 110), "JPEG", exif=exif)

    rgb, rgba = picture(64, 96), picture(80, 56, 4)
    depth = Image.fromarray(_scene(rng, 48, 64, 3)[..., 0].astype(np.uint16) * 257)
    return {
        "image-rgb.png": encoded(rgb, "PNG"),
        "image-rgba.png": encoded(rgba, "PNG"),
        "image-la.png": encoded(rgba.convert("LA"), "PNG"),
        "image-palette.png": encoded(rgb.quantize(16), "PNG"),
        "image-palette-transparent.png": encoded(rgb.quantize(16), "PNG", transparency=3),
        "image-colour-key.png": encoded(Image.new("RGB", (40, 40), (9, 9, 9)), "PNG", transparency=(9, 9, 9)),
        "image-grey.png": encoded(rgb.convert("L"), "PNG"),
        "image-1-bit.png": encoded(rgb.convert("1"), "PNG"),
        "image-16-bit.png": encoded(depth, "PNG"),
        "image-16-bit.tiff": encoded(depth, "TIFF"),
        "image-rgb.jpg": encoded(picture(333, 500), "JPEG"),
        "image-grey.jpg": encoded(picture(120, 90).convert("L"), "JPEG"),
        "image-cmyk.jpg": encoded(rgb.convert("CMYK"), "JPEG"),
        "image-cmyk.tiff": encoded(rgb.convert("CMYK"), "TIFF"),
        "image-rgba.tiff": encoded(rgba, "TIFF"),
        "image-rgb.webp": encoded(rgb, "WEBP"),
        "image-rgba.webp": encoded(rgba, "WEBP"),
        "image-rgb.bmp": encoded(rgb, "BMP"),
        "image-still.gif": encoded(rgb.quantize(32), "GIF", transparency=5),
        "image-moving.gif": encoded(rgb, "GIF", save_all=True, append_images=[rgb.rotate(180)], duration=100),
        "image-exif-3.jpg": turned(3),
        "image-exif-5.jpg": turned(5),
        "image-exif-6.jpg": turned(6),
        "image-exif-8.jpg": turned(8),
        "image-1x1.png": encoded(picture(1, 1), "PNG"),
        "image-wide-900x5.png": encoded(picture(5, 900), "PNG"),
        "image-tall-5x900.png": encoded(picture(900, 5), "PNG"),
        "image-strip-1990x10.png": encoded(picture(10, 1990), "PNG"),
        "image-large-1600x1200.jpg": encoded(picture(1200, 1600), "JPEG"),
        "image-odd-47x33.png": encoded(picture(33, 47), "PNG"),
    }


# --------------------------------------------------------------------------------------------------------------- sounds


def _sounds(rng: np.random.Generator) -> dict[str, bytes]:
    import soundfile

    def encoded(seconds: float, rate: int, channels: int, format: str, subtype: str | None = None) -> bytes:
        time = np.arange(round(seconds * rate)) / rate
        tones = [
            0.3 * np.sin(2 * np.pi * 330 * (c + 1) * time) + 0.05 * rng.standard_normal(len(time)) for c in range(channels)
        ]
        buffer = io.BytesIO()
        soundfile.write(buffer, np.stack(tones, 1), rate, format=format, subtype=subtype)
        return buffer.getvalue()

    return {
        "audio-16k.wav": encoded(1.3, 16_000, 1, "WAV"),
        "audio-44k-stereo.wav": encoded(0.9, 44_100, 2, "WAV"),
        "audio-8k-8-bit.wav": encoded(1.0, 8_000, 1, "WAV", "PCM_U8"),
        "audio-float.wav": encoded(2.5, 32_000, 1, "WAV", "FLOAT"),
        "audio-48k-stereo.flac": encoded(1.1, 48_000, 2, "FLAC", "PCM_24"),
        "audio-vorbis.ogg": encoded(1.0, 22_050, 1, "OGG", "VORBIS"),
        "audio-opus.ogg": encoded(1.0, 48_000, 2, "OGG", "OPUS"),
        "audio-44k.mp3": encoded(1.0, 44_100, 1, "MP3"),
        "audio-0.05s.wav": encoded(0.05, 16_000, 1, "WAV"),
        "audio-0.0126s.wav": encoded(0.0126, 16_000, 1, "WAV"),
        "audio-31s.wav": encoded(31.0, 16_000, 1, "WAV"),
    }


# ---------------------------------------------------------------------------------------------------------------- films


def _films(rng: np.random.Generator) -> dict[str, bytes]:
    import av

    def encoded(n: int, height: int, width: int, fps: int, format: str, codec: str, pixels: str = "yuv420p") -> bytes:
        scene, buffer = _scene(rng, height, width), io.BytesIO()
        with av.open(buffer, "w", format=format) as container:
            stream: Any = container.add_stream(codec, rate=fps)
            stream.width, stream.height, stream.pix_fmt = width, height, pixels
            for i in range(n):
                frame = np.roll(scene, (3 * i, 5 * i), (0, 1))
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
            container.mux(stream.encode())
        return buffer.getvalue()

    return {
        "video-8x64x64-4fps.mp4": encoded(8, 64, 64, 4, "mp4", "libx264"),
        "video-7x96x64-3fps.mp4": encoded(7, 96, 64, 3, "mp4", "libx264"),
        "video-1-frame.mp4": encoded(1, 64, 64, 4, "mp4", "libx264"),
        "video-2-frames.mp4": encoded(2, 64, 64, 4, "mp4", "libx264"),
        "video-40x64x96-25fps.mp4": encoded(40, 64, 96, 25, "mp4", "libx264"),
        "video-61x48x32-60fps.mp4": encoded(61, 48, 32, 60, "mp4", "libx264"),
        "video-20x360x200-10fps.mp4": encoded(20, 200, 360, 10, "mp4", "libx264"),
        "video-yuv444.mp4": encoded(5, 64, 48, 30, "mp4", "libx264", "yuv444p"),
        "video-vp8.webm": encoded(12, 90, 120, 8, "webm", "libvpx"),
        "video-vp9.webm": encoded(9, 64, 64, 24, "webm", "libvpx-vp9"),
        "video-mpeg4.avi": encoded(12, 64, 64, 10, "avi", "mpeg4"),
        "video-moving.gif": encoded(5, 48, 64, 10, "gif", "gif", "rgb8"),
    }
