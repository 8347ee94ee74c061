"""Pictures are seen as people see them: upright, on white where they are transparent; sounds with samples of full scale 1."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage

from relax_sdk.errors import MediaError
from relax_sdk.media import Audio, Image, MediaKey, MediaRef, MediaStore, Video, decode_image
from relax_sdk.media_places import media_names
from relax_sdk.messages import Message

BLACK, WHITE = (0, 0, 0), (255, 255, 255)


def encoded(image: PILImage.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=format, **options)
    return buffer.getvalue()


def letter(mode: str) -> PILImage.Image:
    """A black square in the middle of a transparent ground whose hidden colour is black, too."""
    shape = np.zeros((12, 12), np.uint8)
    shape[4:8, 4:8] = 255
    return PILImage.merge("RGBA", [PILImage.new("L", (12, 12))] * 3 + [PILImage.fromarray(shape)]).convert(mode)


def palette_letter() -> PILImage.Image:
    image = PILImage.fromarray(np.zeros((12, 12), np.uint8), "L").convert("P")
    image.putpalette([0, 0, 0, 0, 0, 0])
    image.putdata([1 if 4 <= i // 12 < 8 and 4 <= i % 12 < 8 else 0 for i in range(144)])
    return image


@pytest.mark.parametrize(
    "data",
    [
        encoded(letter("RGBA")),
        encoded(letter("LA")),
        encoded(letter("RGBA"), "WEBP", lossless=True),
        encoded(letter("RGBA"), "TIFF"),
        encoded(palette_letter(), "PNG", transparency=0),
        encoded(palette_letter(), "GIF", transparency=0),
    ],
    ids=["RGBA PNG", "LA PNG", "RGBA WebP", "RGBA TIFF", "palette PNG", "GIF"],
)
def test_a_transparent_ground_is_white(data: bytes) -> None:
    shown = decode_image(Image.from_bytes(data).bytes())
    assert shown.shape == (12, 12, 3)
    assert tuple(shown[5, 5]) == BLACK and tuple(shown[0, 0]) == WHITE and tuple(shown[11, 11]) == WHITE


def test_a_colour_key_is_white() -> None:
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[0, 0] = (10, 20, 30)
    shown = decode_image(encoded(PILImage.fromarray(pixels), transparency=(10, 20, 30)))
    assert tuple(shown[0, 0]) == WHITE and tuple(shown[1, 1]) == BLACK


def test_half_transparency_is_mixed_with_white() -> None:
    shown = decode_image(encoded(PILImage.new("RGBA", (2, 2), (255, 0, 0, 128))))
    np.testing.assert_allclose(shown[0, 0], (255, 127, 127), atol=1)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(format: str, orientation: int) -> None:
    """The corner that the EXIF tag says is the top left is the red one; width and height of the reference are as shown."""
    upright = np.full((32, 48, 3), 255, np.uint8)
    upright[:16, :16] = (255, 0, 0)
    upright[16:, 32:] = (0, 0, 255)
    as_stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = PILImage.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100} if format in ("JPEG", "WEBP") else {}
    image = Image.from_bytes(encoded(PILImage.fromarray(np.ascontiguousarray(as_stored)), format, exif=exif, **options))
    assert (image.ref.width, image.ref.height) == (48, 32)
    shown = decode_image(image.bytes()).astype(int)
    assert shown.shape == (32, 48, 3)
    for at, colour in (((8, 8), (255, 0, 0)), ((24, 40), (0, 0, 255)), ((8, 40), WHITE)):
        np.testing.assert_allclose(shown[at], colour, atol=12)


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_16_bit_grey_keeps_its_shades(format: str) -> None:
    values = np.linspace(0, 65_535, 256, dtype=np.uint16).reshape(16, 16)
    shown = decode_image(encoded(PILImage.fromarray(values), format))
    np.testing.assert_array_equal(shown, np.repeat((values >> 8).astype(np.uint8)[..., None], 3, 2))


@pytest.mark.parametrize(
    ("mode", "format"), [("1", "PNG"), ("L", "BMP"), ("CMYK", "JPEG"), ("CMYK", "TIFF"), ("YCbCr", "JPEG"), ("P", "GIF")]
)
def test_other_modes_become_rgb(mode: str, format: str) -> None:
    shown = decode_image(encoded(PILImage.new("RGB", (8, 8), WHITE).convert(mode), format))
    np.testing.assert_allclose(shown, 255, atol=2)


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_range_are_refused_on_creation(mode: str) -> None:
    with pytest.raises(MediaError, match=r"32-bit .* scale them to 8 bits"):
        Image.from_bytes(encoded(PILImage.new(mode, (4, 4)), "TIFF"))


def test_a_pillow_image_that_png_cannot_hold_is_refused() -> None:
    with pytest.raises(MediaError, match=r"CMYK.*convert\('RGB'\)"):
        Image.from_pil(PILImage.new("CMYK", (4, 4)))


@pytest.mark.parametrize("format", ["BMP", "TIFF"])
def test_a_stored_picture_is_found_by_its_hash(format: str, tmp_path) -> None:
    image, store = Image.from_bytes(encoded(PILImage.new("RGB", (4, 4)), format)), MediaStore(tmp_path)
    store.put(image)
    assert store.find(image.ref.sha256) == image.ref


def test_a_gif_is_found_as_the_image_or_the_film_that_a_message_names(tmp_path) -> None:
    data = encoded(PILImage.new("RGB", (32, 32)), "GIF")
    image, film, store = Image.from_bytes(data), Video.from_bytes(data), MediaStore(tmp_path)
    store.put(film)
    message = Message("user", (film, image))
    names = media_names([message.to_openai()])
    refs: dict[MediaKey, MediaRef] = {
        (kind, sha256): found for kind, sha256 in names if (found := store.find(sha256, kind)) is not None
    }
    assert Message.from_openai(message.to_openai(), refs).media == (film, image)
    store.put(picture := Image.from_bytes(encoded(PILImage.new("RGB", (4, 4)), "PNG")))
    assert store.find(picture.ref.sha256, "video") == picture.ref, "of another kind than asked for, which the reader can say"


# --------------------------------------------------------------------------------------------------------------- sounds


def test_samples_that_were_not_scaled_are_refused() -> None:
    with pytest.raises(MediaError, match=r"Audio\.from_array: the samples reach 300, where full scale is 1\.0; divide"):
        Audio.from_array(300 * np.sin(np.arange(16_000) / 9))


def test_a_file_whose_samples_were_not_scaled_is_refused(encode_sound, tmp_path) -> None:
    data = encode_sound("WAV", "FLOAT", samples=np.linspace(-300, 300, 16_000, dtype=np.float32))
    with pytest.raises(MediaError, match="reach 300"):
        MediaStore(tmp_path).put(Audio.from_bytes(data))


@pytest.mark.parametrize("shape", [(2, 16_000), (1, 16_000), (6, 4_000)])
def test_channels_before_samples_are_told_to_be_transposed(shape: tuple[int, int]) -> None:
    with pytest.raises(MediaError, match=rf"{shape[1]} channels of {shape[0]} samples; transpose it"):
        Audio.from_array(np.zeros(shape, np.float32))
