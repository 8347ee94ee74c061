"""White lists and limits: what is none of the formats is opened by no decoder, what is accepted can be served, and what would
cost too much is refused before it is decoded."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import decord
import numpy as np
import pytest
import soundfile
from PIL import Image as PILImage

from relax_sdk.decoding import decode_video
from relax_sdk.errors import MediaError
from relax_sdk.media import PARTS, Audio, Image, MediaLimits, MediaStore, Video, decode_audio, decode_image
from relax_sdk.media_formats import FORMATS

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (48, 64, 3), dtype=np.uint8)
WAVE = (0.3 * np.sin(np.arange(16_000) / 9)).astype(np.float32)

SDP = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
NO_FILMS = {
    "SDP, which opens UDP ports": SDP,
    "ffconcat, which opens files": b"ffconcat version 1.0\nfile /etc/hostname\n",
    "HLS": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n",
    "DASH": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" profiles="urn:mpeg:dash:profile:full:2011"/>',
    "SDP behind a box that is no ftyp of MP4": b"\1\1\1\1ftypjp2 \n" + SDP,
    "Matroska without a type": b"\x1a\x45\xdf\xa3\x84\x42\x86\x81\x01\n" + SDP,
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
}


@pytest.fixture
def no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every decoder fails the test."""

    def opened(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a decoder was asked")

    for module, name in ((av, "open"), (decord, "VideoReader"), (soundfile, "SoundFile"), (PILImage, "open")):
        monkeypatch.setattr(module, name, opened)


@pytest.mark.parametrize("data", NO_FILMS.values(), ids=NO_FILMS)
def test_what_is_no_film_is_opened_by_no_demuxer(no_decoder: None, data: bytes) -> None:
    with pytest.raises(MediaError, match=r"not a readable video.*MP4, WebM, AVI, GIF"):
        Video.from_bytes(data)
    with pytest.raises(MediaError, match=r"not a readable video.*MP4, WebM, AVI, GIF"):
        decode_video(data)


def picture(format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    PILImage.fromarray(NOISE).save(buffer, format=format, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("format", ["ICO", "PPM", "TGA", "PCX", "SGI", "DIB", "EPS", "PDF"])
def test_pictures_of_other_formats_are_refused_by_name(no_decoder: None, format: str) -> None:
    with pytest.raises(MediaError, match=r"not a readable image.*PNG, JPEG, WebP, GIF, BMP, TIFF"):
        Image.from_bytes(picture(format))


def sound(format: str, subtype: str | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, WAVE, 16_000, format=format, subtype=subtype, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("format", ["AIFF", "AU", "CAF", "W64", "RF64", "VOC", "NIST", "MAT5"])
def test_sounds_of_other_formats_are_refused_by_name(format: str) -> None:
    with pytest.raises(MediaError, match=r"not a readable sound.*WAV, FLAC, Ogg, MP3"):
        Audio.from_bytes(sound(format))


def test_a_tag_of_mp3_does_not_hide_another_format() -> None:
    with pytest.raises(MediaError, match=r"not a readable sound|is not taken"):
        Audio.from_bytes(b"ID3\4\0\0\0\0\0\0" + sound("AIFF"))


def test_samples_in_an_exotic_encoding_are_refused() -> None:
    with pytest.raises(MediaError, match="samples as GSM610 is not taken"):
        Audio.from_bytes(sound("WAV", "GSM610"))


def film(container: str, codec: str, n: int = 6) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        stream: Any = out.add_stream(codec, rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "rgb8" if codec == "gif" else "yuv420p"
        for i in range(n):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(NOISE, i, 0), format="rgb24")))
        out.mux(stream.encode())
    return buffer.getvalue()


def phone_picture() -> bytes:
    """Two JPEGs in one file, as phones write them (MPO)."""
    buffer = io.BytesIO()
    PILImage.fromarray(NOISE).save(buffer, format="MPO", save_all=True, append_images=[PILImage.fromarray(NOISE[::-1])])
    return buffer.getvalue()


TAKEN: dict[str, tuple[str, str, Callable[[], bytes]]] = {
    "PNG": ("image", "image/png", lambda: picture("PNG")),
    "WebP": ("image", "image/webp", lambda: picture("WEBP")),
    "GIF": ("image", "image/gif", lambda: picture("GIF")),
    "BMP": ("image", "image/bmp", lambda: picture("BMP")),
    "TIFF": ("image", "image/tiff", lambda: picture("TIFF")),
    "JPEG": ("image", "image/jpeg", lambda: picture("JPEG")),
    "JPEG of a phone": ("image", "image/jpeg", phone_picture),
    "BigTIFF": ("image", "image/tiff", lambda: picture("TIFF", big_tiff=True)),
    "WAV": ("audio", "audio/wav", lambda: sound("WAV")),
    "WAV, extensible": ("audio", "audio/wav", lambda: sound("WAVEX")),
    "WAV, big-endian": ("audio", "audio/wav", lambda: sound("WAV", endian="BIG")),
    "FLAC": ("audio", "audio/flac", lambda: sound("FLAC")),
    "Ogg": ("audio", "audio/ogg", lambda: sound("OGG")),
    "MP3": ("audio", "audio/mpeg", lambda: sound("MP3")),
    "MP4": ("video", "video/mp4", lambda: film("mp4", "libx264")),
    "MOV": ("video", "video/mp4", lambda: film("mov", "mpeg4")),
    "WebM": ("video", "video/webm", lambda: film("webm", "libvpx-vp9")),
    "Matroska": ("video", "video/webm", lambda: film("matroska", "libx264")),
    "AVI": ("video", "video/x-msvideo", lambda: film("avi", "mpeg4")),
    "GIF film": ("video", "video/gif", lambda: film("gif", "gif")),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_stored_is_found_and_decoded(tmp_path: Path, name: str) -> None:
    kind, mime, make = TAKEN[name]
    store, data = MediaStore(tmp_path), make()
    ref = store.put(PARTS[kind].from_bytes(data))
    assert ref.mime == mime
    assert store.find(ref.sha256) is not None and store.find(ref.sha256, kind) == ref  # type: ignore[arg-type]
    assert store.get(ref) == data
    decode: dict[str, Callable[[bytes], Any]] = {"image": decode_image, "audio": decode_audio, "video": decode_video}
    assert len(decode[kind](data))


def test_every_format_of_the_table_was_tried() -> None:
    assert {mime for _, mime, _ in TAKEN.values()} == {format.mime for format in FORMATS}


def test_nothing_enters_the_store_that_it_could_not_find(tmp_path: Path) -> None:
    from dataclasses import replace

    part = Image.from_array(NOISE)
    with pytest.raises(MediaError, match="'image/x-icon' is none of the formats"):
        MediaStore(tmp_path).put(Image(replace(part.ref, mime="image/x-icon"), part.bytes()))


# ------------------------------------------------------------------------------------------------- before it is decoded


def gif(side: int, frames: int) -> bytes:
    """An animation on a large canvas, each frame of which changes one pixel: 15 bytes a frame."""
    head = b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\2\x44\1\0"
    return head + frames * frame + b"\x3b"


@pytest.mark.parametrize(("side", "frames"), [(4000, 430), (4000, 17_000), (16, 30_000)], ids=["6.9 kB", "272 kB", "tiny"])
def test_an_animation_is_measured_by_its_frames_and_their_size(side: int, frames: int) -> None:
    large = r"GIF of [\d,]+ frames of 4000x4000 pixels, [\d,]+ in all, more than the limit of 1,073,741,824"
    with pytest.raises(MediaError, match=large if side > 16 else r"video of 30,000 frames, more than the limit of 18,000"):
        Video.from_bytes(gif(side, frames))


def test_a_film_is_measured_by_its_frames_and_not_by_its_header() -> None:
    data = film("webm", "libvpx", 40)
    for name in (b"\x44\x89",):  # the element that states the duration
        at = data.index(name)
        data = data[: at + 3] + struct.pack(">d", 1.0)[: data[at + 2] & 0x7F] + data[at + 3 + (data[at + 2] & 0x7F) :]
    with pytest.raises(MediaError, match="video of 21 frames, more than the limit of 20"):
        Video.from_bytes(data, limits=MediaLimits(max_frames=20))
    with pytest.raises(MediaError, match=r"more than the limit of 2 s"):
        Video.from_bytes(data, limits=MediaLimits(max_seconds=2))
    with pytest.raises(MediaError, match=r"video of 40 frames of 64x48 pixels, 122,880 in all, more than the limit of 100,000"):
        Video.from_bytes(data, limits=MediaLimits(max_film_pixels=100_000))


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (MediaLimits(max_channels=1), "sound of 2 channels, more than the limit of 1"),
        (MediaLimits(max_sampling_rate=8_000), "sound at 16,000 Hz, more than the limit of 8,000"),
        (MediaLimits(max_samples=31_999), "16,000 samples in 2 channels, more than the limit of 31,999"),
    ],
)
def test_a_sound_is_measured_by_channels_rate_and_length(limits: MediaLimits, why: str) -> None:
    data = Audio.from_array(np.stack([WAVE, WAVE], 1)).bytes()
    with pytest.raises(MediaError, match=why):
        Audio.from_bytes(data, limits=limits)


def test_a_header_of_flac_that_promises_more_than_there_is() -> None:
    """STREAMINFO may state 2^36 samples; nothing of that size is made."""
    data = bytearray(sound("FLAC"))
    data[21] |= 0x0F
    with pytest.raises(MediaError, match=r"more than the limit of 600 s"):
        decode_audio(bytes(data))


def test_a_picture_that_was_made_larger_is_refused_when_it_is_decoded() -> None:
    data = bytearray(picture("BMP"))
    data[18:26] = struct.pack("<ii", 5000, 5000)
    with pytest.raises(MediaError, match="image of 5000x5000 pixels, more than the limit"):
        decode_image(bytes(data))


def test_chunks_without_end_before_the_samples_are_refused() -> None:
    data = b"RIFF" + struct.pack("<I", 4 + 8 * 2**20) + b"WAVE" + (b"junk" + bytes(4)) * 2**20
    with pytest.raises(MediaError, match="chunks stand before its samples"):
        decode_audio(data)
