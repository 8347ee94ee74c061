"""Media: what goes in comes out, bad files are refused with a reason, the store holds each content once."""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage

from relax_sdk.errors import MediaError
from relax_sdk.media import (
    Audio,
    Image,
    Media,
    MediaLimits,
    MediaRef,
    MediaStore,
    Video,
    decode_audio,
    decode_image,
    decode_video,
    from_ref,
    probe,
    verify,
)

RNG = np.random.default_rng(0)
PARTS = {"image": Image, "audio": Audio, "video": Video}
SOUND_FORMATS = [("WAV", "PCM_16"), ("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)]


# ---------------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("shape", [(5, 7), (5, 7, 3), (5, 7, 4), (1, 1, 3)])
def test_image_pixels_survive(shape: tuple[int, ...]) -> None:
    pixels = RNG.integers(0, 256, shape, dtype=np.uint8)
    image = Image.from_array(pixels)
    assert (image.ref.width, image.ref.height, image.ref.mime) == (shape[1], shape[0], "image/png")
    shown = decode_image(image.bytes())
    assert shown.shape == (*shape[:2], 3) and shown.dtype == np.uint8
    if shape[2:] == (4,):
        alpha = pixels[..., 3:] / 255
        np.testing.assert_allclose(shown, pixels[..., :3] * alpha + 255 * (1 - alpha), atol=1)
    else:
        np.testing.assert_array_equal(shown, np.repeat(pixels[..., None], 3, 2) if len(shape) == 2 else pixels)


def test_image_from_a_strided_view_and_from_pil() -> None:
    pixels = RNG.integers(0, 256, (8, 6, 3), dtype=np.uint8)
    assert Image.from_array(pixels[::2, ::-1]).ref == Image.from_array(pixels[::2, ::-1].copy()).ref
    assert Image.from_pil(PILImage.fromarray(pixels)).ref == Image.from_array(pixels).ref


@pytest.mark.parametrize(
    "pixels",
    [np.zeros((4, 4, 3)), np.zeros((4,), np.uint8), np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4, 3), np.uint8)],
    ids=["float", "flat", "2 channels", "empty"],
)
def test_image_array_of_the_wrong_form(pixels: np.ndarray) -> None:
    with pytest.raises(MediaError, match=r"wants uint8"):
        Image.from_array(pixels)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_samples_survive_to_16_bit(dtype: type) -> None:
    wave = np.linspace(-1, 1, 4000).astype(dtype)
    audio = Audio.from_array(wave, 16_000)
    assert audio.ref.duration == pytest.approx(0.25) and audio.ref.sampling_rate == 16_000
    decoded = decode_audio(audio.bytes())
    assert decoded.dtype == np.float32
    np.testing.assert_allclose(decoded, wave, atol=1 / 32768)


def test_loud_samples_are_kept_as_floats() -> None:
    wave = np.linspace(-3, 3, 1000, dtype=np.float32)
    np.testing.assert_array_equal(decode_audio(Audio.from_array(wave).bytes()), wave)


def test_stereo_is_mixed_and_resampled() -> None:
    left = np.sin(2 * np.pi * 440 * np.arange(48_000) / 48_000)
    decoded = decode_audio(Audio.from_array(np.stack([left, left * 0], 1), 48_000).bytes())
    assert decoded.shape == (16_000,)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(16_000) / 16_000)
    np.testing.assert_allclose(decoded[200:-200], expected[200:-200], atol=2e-3)


@pytest.mark.parametrize(
    ("samples", "rate"),
    [
        (np.zeros(0, np.float32), 16_000),
        (np.zeros((2, 2, 2), np.float32), 16_000),
        (np.zeros(10, np.int16), 16_000),
        (np.array([0.0, np.nan]), 16_000),
        (np.array([0.0, np.inf]), 16_000),
        (np.zeros(10, np.float32), 0),
        (np.zeros(10, np.float32), -1),
        (np.zeros((1, 5000), np.float32), 16_000),
    ],
    ids=["empty", "3-d", "integers", "nan", "inf", "rate 0", "rate -1", "5000 channels"],
)
def test_samples_of_the_wrong_form(samples: np.ndarray, rate: int) -> None:
    with pytest.raises(MediaError, match=r"Audio\.from_array"):
        Audio.from_array(samples, rate)


def test_frames_survive_nearly() -> None:
    smooth = np.linspace(0, 255, 64).astype(np.uint8)
    frames = np.stack([np.broadcast_to(np.roll(smooth, 8 * t)[None, :, None], (64, 64, 3)) for t in range(8)])
    video = Video.from_array(frames, fps=4)
    assert (video.ref.width, video.ref.height, video.ref.fps, video.ref.duration) == (64, 64, 4.0, 2.0)
    decoded, fps = decode_video(video.bytes())
    assert decoded.shape == frames.shape and decoded.dtype == np.uint8 and fps == 4.0
    assert np.abs(decoded.astype(int) - frames.astype(int)).mean() < 4
    assert Video.from_array(frames, fps=4).ref.sha256 == video.ref.sha256, "the same frames must give the same bytes"


def test_a_long_video_is_sampled_evenly() -> None:
    frames = np.repeat(np.arange(0, 250, 5, dtype=np.uint8), 32 * 32 * 3).reshape(50, 32, 32, 3)
    decoded, fps = decode_video(Video.from_array(frames, fps=10).bytes(), max_frames=4)
    np.testing.assert_allclose(decoded.mean((1, 2, 3)), [0, 80, 165, 245], atol=3)
    assert fps == pytest.approx(10 * 4 / 50)


@pytest.mark.parametrize(
    ("frames", "fps", "why"),
    [
        (np.zeros((2, 4, 4, 3)), 4, "wants uint8"),
        (np.zeros((4, 4, 3), np.uint8), 4, "wants uint8"),
        (np.zeros((0, 4, 4, 3), np.uint8), 4, "wants uint8"),
        (np.zeros((2, 5, 4, 3), np.uint8), 4, "even height and width"),
        (np.zeros((2, 16, 16, 3), np.uint8), 0, "fps = 0; allowed"),
        (np.zeros((2, 16, 16, 3), np.uint8), float("nan"), "fps = nan; allowed"),
    ],
)
def test_frames_of_the_wrong_form(frames: np.ndarray, fps: float, why: str) -> None:
    with pytest.raises(MediaError, match=why):
        Video.from_array(frames, fps=fps)


@pytest.mark.parametrize(
    ("format", "subtype", "mime"),
    [
        ("WAV", "PCM_16", "audio/wav"),
        ("FLAC", None, "audio/flac"),
        ("OGG", "VORBIS", "audio/ogg"),
        ("OGG", "OPUS", "audio/ogg"),
        ("MP3", None, "audio/mpeg"),
    ],
)
@pytest.mark.parametrize("rate", [16_000, 48_000])
def test_sound_formats(encode_sound, format: str, subtype: str | None, mime: str, rate: int) -> None:
    data = encode_sound(format, subtype, rate)
    audio = Audio.from_bytes(data)
    assert audio.ref.mime == mime and audio.ref.duration == pytest.approx(1.0, abs=0.1)
    assert len(decode_audio(data)) == pytest.approx(16_000, rel=0.1)
    assert audio.bytes() == data, "bytes are never re-encoded"


@pytest.mark.parametrize(("container", "codec"), [("mp4", "libx264"), ("webm", "libvpx"), ("webm", "libvpx-vp9")])
def test_video_formats(encode_video, noise_frames: np.ndarray, container: str, codec: str) -> None:
    data = encode_video(container, codec, noise_frames[:10])
    video = Video.from_bytes(data)
    assert video.ref.mime == f"video/{container}" and (video.ref.width, video.ref.height) == (64, 64)
    assert decode_video(data, 4)[0].shape == (4, 64, 64, 3)


def test_a_gif_is_decoded_by_the_fallback() -> None:
    frames = [PILImage.new("RGB", (16, 16), (40 * i, 0, 0)) for i in range(5)]
    buffer = io.BytesIO()
    frames[0].save(buffer, format="GIF", save_all=True, append_images=frames[1:], duration=100)
    assert Video.from_bytes(buffer.getvalue()).ref.mime == "video/gif"
    decoded, _ = decode_video(buffer.getvalue(), max_frames=3)
    np.testing.assert_allclose(decoded[:, 0, 0, 0], [0, 80, 160], atol=4)


# ------------------------------------------------------------------------------------------------------------ bad files


@pytest.mark.parametrize("kind", ["image", "audio", "video"])
@pytest.mark.parametrize("data", [b"", b"\0", b"A text file, not a medium.\n" * 20], ids=["zero byte", "one byte", "text"])
def test_what_is_no_medium_is_refused(kind: str, data: bytes) -> None:
    with pytest.raises(MediaError, match=r"empty|not a readable"):
        PARTS[kind].from_bytes(data)


def refuse(cls: type[Media], data: bytes) -> str:
    """The reason why `data` does not pass header and decoding."""
    with pytest.raises(MediaError) as caught:
        verify(data, cls.from_bytes(data).ref)
    return str(caught.value)


@pytest.mark.parametrize("keep", [0.97, 0.6, 0.3])
@pytest.mark.parametrize(
    ("format", "subtype"), [("WAV", "PCM_16"), ("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)]
)
def test_a_sound_cut_short_is_refused(encode_sound, format: str, subtype: str | None, keep: float) -> None:
    data = encode_sound(format, subtype)
    verify(data, Audio.from_bytes(data).ref)
    assert refuse(Audio, data[: int(len(data) * keep)])


@pytest.mark.parametrize("keep", [0.97, 0.6, 0.3])
@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [("mp4", "libx264", {}), ("mp4", "libx264", {"movflags": "faststart"}), ("webm", "libvpx", {})],
    ids=["moov at the end", "faststart", "webm"],
)
def test_a_video_cut_short_is_refused(
    encode_video, noise_frames, container: str, codec: str, options: dict, keep: float
) -> None:
    data = encode_video(container, codec, noise_frames, options=options)
    verify(data, Video.from_bytes(data).ref)
    assert refuse(Video, data[: int(len(data) * keep)])


@pytest.mark.parametrize("keep", [0.97, 0.6, 0.3])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_an_image_cut_short_is_refused(format: str, keep: float) -> None:
    buffer = io.BytesIO()
    PILImage.fromarray(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(buffer, format=format)
    data = buffer.getvalue()
    verify(data, Image.from_bytes(data).ref)
    assert refuse(Image, data[: int(len(data) * keep)])


def test_a_sound_without_samples_is_refused(encode_sound) -> None:
    assert "no samples" in refuse(Audio, encode_sound("WAV", samples=np.zeros(0, np.float32)))


def test_a_sound_with_nan_is_refused(encode_sound) -> None:
    samples = np.array([0.0, np.nan, 0.5, np.inf], np.float32)
    assert "2 samples that are NaN or infinite" in refuse(Audio, encode_sound("WAV", "FLOAT", samples=samples))


def test_a_stream_of_unknown_length_passes(encode_sound) -> None:
    data = bytearray(encode_sound("WAV", "PCM_16"))
    at = data.index(b"data")
    data[at + 4 : at + 8] = b"\xff" * 4
    assert len(decode_audio(bytes(data))) == 16_000


def test_an_mp4_with_sound_only_is_no_video(encode_video) -> None:
    assert "no video stream" in refuse(Video, encode_video(audio=True))


def test_scrambled_frames_are_refused(encode_video, noise_frames) -> None:
    data = bytearray(encode_video("mp4", "libx264", noise_frames))
    body = data.index(b"mdat") + 200
    data[body : body + 60_000] = RNG.integers(0, 256, 60_000, dtype=np.uint8).tobytes()
    assert refuse(Video, bytes(data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is huge."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [30_000, 12_000, 5_000])
def test_a_decompression_bomb_is_refused_by_its_header(side: int) -> None:
    with pytest.raises(MediaError, match=r"pixels, more than the limit|decompression bomb"):
        Image.from_bytes(bomb(side, side))


def test_a_file_of_100_megabytes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    with pytest.raises(MediaError, match=r"large\.png: 104,857,600 bytes, more than the limit of 67,108,864"):
        Image.from_file(path)
    with pytest.raises(MediaError, match="image of 104,857,600 bytes"):
        Image.from_bytes(path.read_bytes())


def test_limits_can_be_set(encode_sound, encode_video, noise_frames) -> None:
    tight = MediaLimits(max_seconds=0.5, max_frames=5)
    with pytest.raises(MediaError, match=r"sound of 1\.0 s, more than the limit of 0\.5 s"):
        Audio.from_bytes(encode_sound("WAV"), limits=tight)
    video = encode_video("mp4", "libx264", noise_frames[:10])
    with pytest.raises(MediaError, match=r"more than the limit of 0\.5 s"):
        Video.from_bytes(video, limits=tight)
    with pytest.raises(MediaError, match="video of 10 frames, more than the limit of 5"):
        Video.from_bytes(video, limits=MediaLimits(max_frames=5))
    with pytest.raises(MediaError, match="16,000 samples in 1 channels, more than the limit of 100"):
        Audio.from_bytes(encode_sound("WAV"), limits=MediaLimits(max_samples=100))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"nothing\.wav: cannot be read"):
        Audio.from_file(tmp_path / "nothing.wav")


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.mp4").write_text("not a video")
    with pytest.raises(MediaError, match=r"notes\.mp4: not a readable video"):
        Video.from_file(tmp_path / "notes.mp4")


# ---------------------------------------------------------------------------------------------- references and the store


@pytest.fixture
def picture() -> Image:
    return Image.from_array(np.full((4, 4, 3), 7, np.uint8))


def test_a_file_changed_or_removed_after_it_was_read(tmp_path: Path, picture: Image) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(picture.bytes())
    part = Image.from_file(path)
    path.write_bytes(Image.from_array(np.zeros((4, 4, 3), np.uint8)).bytes())
    with pytest.raises(MediaError, match=r"a\.png: changed after it was first read"):
        part.bytes()
    path.unlink()
    with pytest.raises(MediaError, match=r"a\.png: cannot be read"):
        part.bytes()


def test_equal_content_is_equal_and_stored_once(tmp_path: Path, picture: Image) -> None:
    store = MediaStore(tmp_path / "media")
    (tmp_path / "copy.png").write_bytes(picture.bytes())
    copy = Image.from_file(tmp_path / "copy.png")
    assert copy == picture.to_ref() == picture, "parts compare by their reference, wherever their bytes are"
    assert store.put(picture) == store.put(copy)
    assert [p.name for p in (tmp_path / "media").rglob("*.*")] == [picture.ref.sha256 + ".png"]
    assert store.get(picture.ref) == picture.bytes() == store.load(picture.ref).bytes()


def test_a_reference_has_no_bytes(picture: Image) -> None:
    with pytest.raises(MediaError, match="carries no bytes"):
        picture.to_ref().bytes()
    assert from_ref(picture.ref) == picture


def test_a_reference_to_something_else() -> None:
    with pytest.raises(MediaError, match="not an image, audio or video"):
        from_ref(MediaRef("0" * 64, "text/html", 3))


@pytest.mark.parametrize(
    "sha256", ["../../etc/passwd", "", "A" * 64, "0" * 63, "/" + "0" * 63, "0" * 62 + "..", "0" * 64 + "\0"]
)
def test_no_path_leads_out_of_the_store(tmp_path: Path, picture: Image, sha256: str) -> None:
    store = MediaStore(tmp_path)
    ref = replace(picture.ref, sha256=sha256)
    for access in (store.path, store.get, store.load, lambda r: store.put(Image(r, picture.bytes()))):
        with pytest.raises(MediaError, match="not a sha256"):
            access(ref)


@pytest.mark.parametrize("mime", ["image/../../x", "image/png/../..", "image/\0"])
def test_no_mime_leads_out_of_the_store(tmp_path: Path, picture: Image, mime: str) -> None:
    assert MediaStore(tmp_path).path(replace(picture.ref, mime=mime)).parent.parent == tmp_path


def test_bytes_that_are_not_what_they_claim(tmp_path: Path, picture: Image) -> None:
    with pytest.raises(MediaError, match="do not have the sha256"):
        MediaStore(tmp_path).put(Image(replace(picture.ref, sha256="0" * 64), picture.bytes()))


def test_damaged_bytes_do_not_enter_the_store(tmp_path: Path) -> None:
    data = Image.from_array(RNG.integers(0, 256, (64, 64, 3), dtype=np.uint8)).bytes()[:6000]
    with pytest.raises(MediaError, match="damaged image"):
        MediaStore(tmp_path).put(Image.from_bytes(data))
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_what_is_not_in_the_store(tmp_path: Path, picture: Image) -> None:
    with pytest.raises(MediaError, match=f"image {picture.ref.sha256[:12]} is not in"):
        MediaStore(tmp_path).get(picture.ref)


def test_a_store_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(MediaError, match="cannot be created"):
        MediaStore(tmp_path / "taken")


def _put_many(root: str, barrier, results) -> None:
    store = MediaStore(root)
    pictures = [Image.from_array(np.full((16, 16, 3), i, np.uint8)) for i in range(40)]
    barrier.wait(30)
    results.put([store.put(picture).sha256 for picture in pictures])


def test_two_processes_fill_one_store(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    writers = [context.Process(target=_put_many, args=(str(tmp_path), barrier, results)) for _ in range(2)]
    for writer in writers:
        writer.start()
    first, second = results.get(timeout=60), results.get(timeout=60)
    for writer in writers:
        writer.join(30)
        assert writer.exitcode == 0
    assert first == second
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert sorted(p.stem for p in files) == sorted(first), "each once, and nothing half-written is left"
    assert all(hashlib.sha256(p.read_bytes()).hexdigest() == p.stem for p in files)


def test_a_data_uri_holds_the_bytes(picture: Image) -> None:
    import base64

    head, data = picture.data_uri().split(",")
    assert head == "data:image/png;base64" and base64.b64decode(data) == picture.bytes()


def test_notebooks_can_show_media(picture: Image) -> None:
    assert picture._repr_png_().startswith(b"\x89PNG")
    assert "<audio" in Audio.from_array(np.zeros(100, np.float32))._repr_html_()
    assert "<video" in Video.from_array(np.zeros((2, 16, 16, 3), np.uint8))._repr_html_()


def test_probe_says_what_was_expected(picture: Image) -> None:
    with pytest.raises(MediaError, match="not a readable sound"):
        probe(picture.bytes(), "audio")
    with pytest.raises(MediaError, match="not a readable image"):
        probe(Audio.from_array(np.zeros(100, np.float32)).bytes(), "image")
    with pytest.raises(MediaError, match="not a readable video"):
        probe(picture.bytes(), "video")
