"""Media files that mean harm: bombs made by hand, and good files of every kind that were cut, mutated and spliced."""

from __future__ import annotations

import io
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.media_files import make_files
from relax_sdk.media_formats import NOUNS, Kind


@dataclass(frozen=True)
class HostileFile:
    """One file, and what it is offered as."""

    name: str
    kind: Kind
    data: bytes


def hostile_files(n: int, seed: int = 0) -> list[HostileFile]:
    """All bombs, and mutants up to `n` files in all; a seed fixes the mutations, but not all encoders write the same twice."""
    found = list(bombs())
    return [*found, *mutants(n - len(found), seed)][:n]


def mutants(n: int, seed: int = 0) -> list[HostileFile]:
    """So many files that were good; every kind comes in turn."""
    found: list[HostileFile] = []
    with tempfile.TemporaryDirectory() as folder:
        good = [(path.name, path.read_bytes()) for path in make_files(Path(folder))]
    rng = np.random.default_rng(seed)
    kinds: list[Kind] = list(NOUNS)
    while len(found) < n:
        name, data = good[len(found) % len(good)]
        kind: Kind = name.split("-", 1)[0]  # type: ignore[assignment]
        how = MUTATIONS[int(rng.integers(len(MUTATIONS)))]
        mutant = how(rng, data, good[int(rng.integers(len(good)))][1])
        if rng.random() < 0.05:
            kind = kinds[int(rng.integers(len(kinds)))]
        found.append(HostileFile(f"{name}, {how.__name__.strip('_').replace('_', ' ')}", kind, mutant))
    return found


# ------------------------------------------------------------------------------------------------------------ mutations


def _cut(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    return data[: int(rng.integers(1, len(data)))]


def _flipped_bits(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    changed = np.frombuffer(data, np.uint8).copy()
    at = rng.integers(0, len(changed), int(rng.integers(1, 65)))
    changed[at] ^= (1 << rng.integers(0, 8, len(at))).astype(np.uint8)
    return changed.tobytes()


def _flipped_in_the_header(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    return _flipped_bits(rng, data[:256], other) + data[256:]


def _noise_inside(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    start, size = int(rng.integers(len(data))), int(rng.integers(1, 4096))
    return data[:start] + rng.bytes(min(size, len(data) - start)) + data[start + size :]


def _extreme_number(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    """Some field becomes the greatest or the least number that it can hold."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 9))):
        at, size = int(rng.integers(min(len(data), 2048))), int(rng.choice([1, 2, 4, 8]))
        value = [b"\xff" * size, bytes(size), b"\x7f" + b"\xff" * (size - 1), b"\x80" + bytes(size - 1)][int(rng.integers(4))]
        changed[at : at + size] = value[: len(changed) - at]
    return bytes(changed)


def _piece_removed(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    start, end = sorted(int(at) for at in rng.integers(8, len(data) + 1, 2))
    return data[:start] + data[end:]


def _piece_repeated(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    start, end = sorted(int(at) for at in rng.integers(8, len(data) + 1, 2))
    return data[:end] + data[start:end] * int(rng.integers(1, 20)) + data[end:]


def _head_of_another(rng: np.random.Generator, data: bytes, other: bytes) -> bytes:
    at = int(rng.integers(8, 2048))
    return other[:at] + data[at:]


MUTATIONS = (
    *(_cut, _flipped_bits, _flipped_in_the_header, _noise_inside, _extreme_number),
    *(_piece_removed, _piece_repeated, _head_of_another),
)


# ---------------------------------------------------------------------------------------------------------------- bombs


def bombs() -> Iterator[HostileFile]:
    """Small files that would cost much, or make a decoder reach for something else."""
    for name, text in TEXTS.items():
        yield HostileFile(name, "video", text)
    for side in (4_096, 8_000, 30_000, 2**31 - 1):
        yield HostileFile(f"PNG of {side}x{side} pixels of nothing", "image", png(side, side))
    yield HostileFile(
        "PNG with 64 MiB of compressed text", "image", png(4, 4, (b"zTXt", b"a\0\0" + zlib.compress(bytes(2**26), 9)))
    )
    yield HostileFile("PNG with a profile of 64 MiB", "image", png(4, 4, (b"iCCP", b"a\0\0" + zlib.compress(bytes(2**26), 9))))
    yield HostileFile("PNG of a million chunks", "image", png(4, 4, *[(b"tEXt", b"a\0b")] * 2**20))
    for side, frames in ((4_000, 430), (4_000, 17_000), (65_535, 10), (16, 60_000)):
        yield HostileFile(f"GIF of {frames} frames of one pixel on {side}x{side}", "video", gif(side, frames))
        yield HostileFile(f"GIF of {frames} frames of one pixel on {side}x{side}, as an image", "image", gif(side, frames))
    yield HostileFile("JPEG of 4096x4096 pixels with 5,000 scans", "image", progressive_jpeg(4096, 5_000))
    yield HostileFile("BMP of 60000x60000 pixels", "image", bmp(60_000))
    yield HostileFile("TIFF with a strip of 4 GiB", "image", tiff(4_000, 2**32 - 1))
    yield HostileFile("WebP with a canvas of 16383x16383", "image", webp(16_383))
    yield HostileFile("WAV of two million chunks", "audio", wav(b"junk" + bytes(4), 2**21))
    yield HostileFile("WAV of 65,535 channels", "audio", wav(b"", 0, channels=2**16 - 1))
    yield HostileFile("FLAC that promises 2^36 samples", "audio", promising_flac())
    yield HostileFile("FLAC of 100 million samples of silence", "audio", silence(100_000_000))
    yield HostileFile("MP3 behind a tag of 256 MiB", "audio", b"ID3\4\0\0\x7f\x7f\x7f\x7f" + bytes(1000))
    yield HostileFile("Ogg of half a million empty pages", "audio", (b"OggS\0\0" + bytes(8) + b"\1\0\0\0" + bytes(9)) * 2**19)
    yield HostileFile("MP4 with a million boxes in each other", "video", nested_boxes(2**20))
    yield HostileFile("MP4 with a table of 2^32 samples", "video", lying_table())
    yield HostileFile("Matroska with a thousand segments in each other", "video", nested_elements(1_000))
    yield HostileFile("Matroska with a million empty clusters", "video", SEGMENT + b"\x1f\x43\xb6\x75\x80" * 2**20)
    yield HostileFile("film of 2,000 frames of 4096x4096 that never change", "video", still_film(4096, 2_000))


SDP = b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
EBML = b"\x1a\x45\xdf\xa3\x8b\x42\x82\x84webm\x42\x87\x81\4"
SEGMENT = EBML + b"\x18\x53\x80\x67\1\xff\xff\xff\xff\xff\xff\xff"
TEXTS = {
    "SDP": SDP,
    "SDP behind a box": b"\1\1\1\1ftypjp2 \n" + SDP,
    "SDP behind a ftyp box": b"\0\0\0\x14ftypisom\0\0\2\0isom\n" + SDP,
    "ffconcat": b"ffconcat version 1.0\nfile /etc/hostname\n",
    "HLS": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/\n#EXT-X-ENDLIST\n",
    "DASH": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" profiles="urn:mpeg:dash:profile:full:2011"/>',
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/hostname"/></svg>',
    "an executable": b"\x7fELF" + bytes(1000),
}


def png(width: int, height: int, *more: tuple[bytes, bytes]) -> bytes:
    """A picture of zeros as far as its bytes go, with more chunks before them."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    rows = zlib.compress(bytes(min(height, 8_000) * (3 * min(width, 8_000) + 1)), 9)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    middle = b"".join(chunk(name, body) for name, body in more)
    return b"\x89PNG\r\n\x1a\n" + header + middle + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def gif(side: int, frames: int) -> bytes:
    """An animation each frame of which changes one pixel: 16 bytes a frame."""
    head = b"GIF89a" + struct.pack("<HHBBB", side, side, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    return head + frames * (b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\2\2\x44\1\0") + b"\x3b"


def progressive_jpeg(side: int, scans: int) -> bytes:
    """A picture whose last scan is sent again and again; each goes over all of it."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (side, side), 128).save(buffer, format="JPEG", progressive=True, quality=10)
    data = buffer.getvalue()
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * scans + data[end:]


def bmp(side: int) -> bytes:
    """A header and one pixel."""
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 58, 0, 0, 54, 40, side, side, 1, 24, 0, 0, 1, 1, 0, 0) + bytes(4)


def tiff(side: int, strip: int) -> bytes:
    """Grey; its only strip is said to have so many bytes."""
    tags = ((256, side), (257, side), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, side), (279, strip))
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4)


def webp(side: int) -> bytes:
    """An animation of that canvas with nothing on it."""
    canvas = struct.pack("<I", side - 1)[:3]
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + canvas * 2 + b"ANIM" + struct.pack("<I", 6) + bytes(6)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def wav(chunk: bytes, n: int, channels: int = 1) -> bytes:
    """So many chunks before one sample."""
    form = b"fmt " + struct.pack("<IHHIIHH", 16, 1, channels, 16_000, 32_000, 2, 16)
    body = b"WAVE" + form + chunk * n + b"data" + struct.pack("<I", 2) + bytes(2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def promising_flac() -> bytes:
    """A second of silence that says it is 50 days."""
    data = bytearray(silence(16_000))
    data[21] |= 0x0F
    return bytes(data)


def silence(n: int) -> bytes:
    """FLAC at 192 kHz: 100 million samples are 500 kB."""
    import soundfile

    buffer = io.BytesIO()
    with soundfile.SoundFile(buffer, "w", 192_000, 1, "PCM_16", format="FLAC") as out:
        block = np.zeros(1_000_000, np.int16)
        for start in range(0, n, len(block)):
            out.write(block[: n - start])
    return buffer.getvalue()


def nested_boxes(depth: int) -> bytes:
    """`moov` in `moov` in `moov` …"""
    boxes = b"".join(struct.pack(">I", 8 * (depth - i)) + b"moov" for i in range(depth))
    return b"\0\0\0\x14ftypisom\0\0\2\0isom" + boxes


def nested_elements(depth: int) -> bytes:
    """Segments of unknown size, each in the one before."""
    return EBML + b"\x18\x53\x80\x67\1\xff\xff\xff\xff\xff\xff\xff" * depth


def lying_table() -> bytes:
    """A film whose table of sizes has as many entries as a number of 32 bits can say."""
    data = bytearray(still_film(64, 4))
    at = data.index(b"stsz")
    data[at + 12 : at + 16] = b"\xff" * 4
    return bytes(data)


def still_film(side: int, frames: int) -> bytes:
    """A grey film in which nothing moves: a few bytes a frame, each as much work as any."""
    import av

    encoder: Any = av.CodecContext.create("mpeg4", "w")
    encoder.width = encoder.height = side
    encoder.pix_fmt, encoder.time_base, encoder.gop_size = "yuv420p", Fraction(1, 30), 600
    grey = av.VideoFrame.from_ndarray(np.full((side * 3 // 2, side), 128, np.uint8), format="yuv420p")
    encoded: list[bytes] = []
    for i in range(3):
        grey.pts = i
        encoded += [bytes(packet) for packet in encoder.encode(grey)]
    first, still = encoded[0], encoded[-1]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream: Any = out.add_stream("mpeg4", rate=30)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for i in range(frames):
            packet = av.Packet(still if i else first)
            packet.stream, packet.time_base, packet.pts, packet.dts, packet.is_keyframe = stream, Fraction(1, 30), i, i, i == 0
            out.mux(packet)
    return buffer.getvalue()
