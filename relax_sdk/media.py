"""Images, sounds and videos by content hash: bytes are kept once and never re-encoded on their way to engine and trainer."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from relax_sdk.decoding import SAMPLING_RATE, check_peak, decode_audio, decode_image, decode_video
from relax_sdk.errors import MediaError, StorageError
from relax_sdk.media_formats import EXTENSIONS, Kind
from relax_sdk.media_limits import LIMITS, MediaLimits
from relax_sdk.probing import MediaKey, MediaRef, probe, verify

if TYPE_CHECKING:
    from typing import Self

    from PIL import Image as PILImage

__all__ = [
    "LIMITS",
    "PARTS",
    "SAMPLING_RATE",
    "Audio",
    "Image",
    "Kind",
    "Media",
    "MediaKey",
    "MediaLimits",
    "MediaRef",
    "MediaStore",
    "Video",
    "decode_audio",
    "decode_image",
    "decode_video",
    "from_ref",
    "probe",
    "verify",
]


@dataclass(frozen=True)
class Media:
    """A part of a message that is not text. Build one with a `from_…` constructor."""

    kind: ClassVar[Kind]
    ref: MediaRef
    _data: bytes | None = field(default=None, repr=False, compare=False)
    _path: str | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_bytes(cls, data: bytes, *, limits: MediaLimits = LIMITS) -> Self:
        """Take an encoded file (PNG, JPEG, WAV, FLAC, MP3, MP4, …) as it is.

        Args:
            data: of one of `relax_sdk.media_formats.FORMATS`.
            limits: tighter than `LIMITS`, which hold for all that is stored or decoded.

        Raises:
            MediaError: too large, of a format that is not taken, or its header cannot be read.
        """
        return cls(probe(data, cls.kind, limits), _data=bytes(data))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, limits: MediaLimits = LIMITS) -> Self:
        """Take a file as it is; its bytes are read again when they are stored.

        Args:
            path: of a file of one of `relax_sdk.media_formats.FORMATS`.
            limits: tighter than `LIMITS`, which hold for all that is stored or decoded.

        Raises:
            MediaError: missing, too large, of a format that is not taken, or its header cannot be read.
        """
        try:
            size = os.stat(path).st_size
            if size > limits.max_bytes:
                raise MediaError(f"{path}: {size:,} bytes, more than the limit of {limits.max_bytes:,}")
            data = Path(path).read_bytes()
        except OSError as error:
            raise MediaError(f"{path}: cannot be read ({error.strerror})") from error
        try:
            return cls(probe(data, cls.kind, limits), _path=str(path))
        except MediaError as error:
            raise MediaError(f"{path}: {error}") from error

    def bytes(self) -> bytes:
        """The encoded bytes.

        Raises:
            MediaError: this part carries only a reference, or its file is gone or has changed since it was hashed.
        """
        if self._data is not None:
            return self._data
        if self._path is None:
            raise MediaError(f"{self.kind} {self.ref.sha256[:12]} carries no bytes; read it from the store that holds it")
        try:
            data = Path(self._path).read_bytes()
        except OSError as error:
            raise MediaError(f"{self._path}: cannot be read ({error.strerror})") from error
        if hashlib.sha256(data).hexdigest() != self.ref.sha256:
            raise MediaError(f"{self._path}: changed after it was first read")
        return data

    def to_ref(self) -> Self:
        """The same part without its bytes, small enough for a message log."""
        return replace(self, _data=None, _path=None)

    def data_uri(self) -> str:
        """`data:<mime>;base64,…`, the form that OpenAI-compatible servers accept."""
        import base64

        return f"data:{self.ref.mime};base64,{base64.b64encode(self.bytes()).decode('ascii')}"


@dataclass(frozen=True)
class Image(Media):
    """A still picture.

    A model sees it upright (EXIF orientation applied), on white where it is transparent, and the first frame of an animation.
    """

    kind: ClassVar[Kind] = "image"

    @classmethod
    def from_array(cls, pixels: np.ndarray) -> Image:
        """Encode pixels losslessly (PNG).

        Args:
            pixels: uint8, shape [height, width], [height, width, 3] or [height, width, 4].

        Raises:
            MediaError: wrong dtype or shape, or too large.
        """
        from PIL import Image as PILImage

        shape_ok = pixels.ndim in (2, 3) and pixels.size > 0 and (pixels.ndim == 2 or pixels.shape[2] in (3, 4))
        if pixels.dtype != np.uint8 or not shape_ok:
            raise MediaError(f"Image.from_array wants uint8 [height, width(, 3 or 4)], got {pixels.dtype} {list(pixels.shape)}")
        return cls.from_pil(PILImage.fromarray(pixels))

    @classmethod
    def from_pil(cls, image: PILImage.Image) -> Image:
        """Encode a Pillow image losslessly (PNG).

        Raises:
            MediaError: a mode that PNG cannot hold (CMYK, LAB, floats), or too large.
        """
        buffer = io.BytesIO()
        try:
            image.save(buffer, format="PNG", compress_level=1)
        except OSError as error:
            raise MediaError(f"Image.from_pil: {error}; convert it first: image.convert('RGB')") from error
        return cls.from_bytes(buffer.getvalue())

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        from PIL import Image as PILImage

        PILImage.fromarray(decode_image(self.bytes())).save(buffer, format="PNG")
        return buffer.getvalue()


@dataclass(frozen=True)
class Audio(Media):
    """A sound."""

    kind: ClassVar[Kind] = "audio"

    @classmethod
    def from_array(cls, samples: np.ndarray, sampling_rate: int = SAMPLING_RATE) -> Audio:
        """Encode samples as WAV: 16-bit when all are within [-1, 1], else 32-bit float.

        Args:
            samples: float, shape [n] or [n, channels]; finite, usually within [-1, 1].
            sampling_rate: Hz.

        Raises:
            MediaError: empty, not finite, wrong shape, channels before samples, samples far beyond 1 (integers that were not
                divided by their full scale), or a sampling rate or number of channels that WAV cannot hold.
        """
        import soundfile

        wave = np.asarray(samples)
        if wave.ndim not in (1, 2) or wave.size == 0 or not np.issubdtype(wave.dtype, np.floating):
            raise MediaError(
                f"Audio.from_array wants non-empty floats [n] or [n, channels], got {wave.dtype} {list(wave.shape)}"
            )
        if not np.isfinite(wave).all():
            raise MediaError(f"Audio.from_array: {int((~np.isfinite(wave)).sum())} of {wave.size} samples are NaN or infinite")
        if wave.ndim == 2 and wave.shape[1] > wave.shape[0]:
            raise MediaError(
                f"Audio.from_array wants [n, channels], got {list(wave.shape)}: {wave.shape[1]} channels of {wave.shape[0]} "
                "samples; transpose it (samples.T)"
            )
        try:
            check_peak(float(np.abs(wave).max()))
        except MediaError as error:
            raise MediaError(f"Audio.from_array: {error}") from error
        buffer = io.BytesIO()
        subtype = "PCM_16" if np.abs(wave).max() <= 1.0 else "FLOAT"
        try:
            soundfile.write(buffer, wave.astype(np.float32), sampling_rate, format="WAV", subtype=subtype)
        except (soundfile.SoundFileError, TypeError, ValueError, OverflowError) as error:
            shape = f"{list(wave.shape)} at {sampling_rate!r} Hz"
            raise MediaError(f"Audio.from_array: samples {shape} cannot be written as WAV ({error})") from error
        return cls.from_bytes(buffer.getvalue())

    def _repr_html_(self) -> str:
        return f'<audio controls src="{self.data_uri()}"></audio>'


@dataclass(frozen=True)
class Video(Media):
    """A film: its pictures, and its sound only where a run has `media.use_audio_in_video`."""

    kind: ClassVar[Kind] = "video"

    @classmethod
    def from_array(cls, frames: np.ndarray, fps: float = 4.0) -> Video:
        """Encode frames once (H.264 in MP4, nearly lossless); the same bytes then go to engine and trainer.

        Args:
            frames: uint8 [n_frames, height, width, 3]; height and width even.
            fps: frames per second.

        Raises:
            MediaError: wrong dtype or shape, too large, or a frame rate that is not above 0.
        """
        import av
        from av.error import FFmpegError

        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or frames.size == 0:
            raise MediaError(
                f"Video.from_array wants uint8 [n_frames, height, width, 3], got {frames.dtype} {list(frames.shape)}"
            )
        if not 0 < fps <= 1000:
            raise MediaError(f"Video.from_array: fps = {fps!r}; allowed: above 0, at most 1000")
        if frames.shape[1] % 2 or frames.shape[2] % 2:
            raise MediaError(f"Video.from_array wants even height and width, got {frames.shape[1]}x{frames.shape[2]}")
        buffer = io.BytesIO()
        try:
            with av.open(buffer, "w", format="mp4") as container:
                stream: Any = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
                stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
                stream.thread_count = 1
                stream.options = {"crf": "10", "preset": "veryfast", "tune": "zerolatency"}
                for pixels in frames:
                    container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
                container.mux(stream.encode())
        except (FFmpegError, ValueError, OverflowError, ZeroDivisionError) as error:
            raise MediaError(f"Video.from_array: {list(frames.shape)} at {fps!r} fps cannot be encoded ({error})") from error
        return cls.from_bytes(buffer.getvalue())

    def _repr_html_(self) -> str:
        return f'<video controls loop autoplay muted width="256" src="{self.data_uri()}"></video>'


PARTS: dict[str, type[Media]] = {"image": Image, "audio": Audio, "video": Video}


def from_ref(ref: MediaRef, data: bytes | None = None) -> Media:
    """The part of the right class for a reference, with or without its bytes.

    Raises:
        MediaError: the reference is not to an image, sound or video.
    """
    return _part_class(ref)(ref, data)


def _part_class(ref: MediaRef) -> type[Media]:
    if ref.kind not in PARTS:
        raise MediaError(f"{ref.sha256[:12]} is {ref.mime!r}, not an image, audio or video")
    return PARTS[ref.kind]


# --------------------------------------------------------------------------------------------------------------- store


class MediaStore:
    """A folder of media files named by the sha256 of their bytes; safe for several processes at once."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MediaError(f"media folder {self.root} cannot be created ({error.strerror})") from error

    def put(self, media: Media) -> MediaRef:
        """Write the bytes if they are not yet here, after decoding them once to be sure they are whole.

        Raises:
            MediaError: damaged, of a format that is not taken, or not what its hash says.
            StorageError: the folder cannot be written, such as on a full disk.
        """
        if self.path(media.ref).exists():
            return media.ref
        data = media.bytes()
        verify(data, media.ref)
        self.write(media.ref, data)
        return media.ref

    def write(self, ref: MediaRef, data: bytes) -> None:
        """Write bytes that were verified, such as by another process, if they are not yet here.

        Raises:
            MediaError: of a format that is not taken, or not what their hash says.
            StorageError: the folder cannot be written, such as on a full disk.
        """
        path = self.path(ref)
        if path.exists():
            return
        if ref.mime not in EXTENSIONS:
            raise MediaError(f"{ref.mime!r} is none of the formats that are taken: {', '.join(EXTENSIONS)}")
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise MediaError(f"{ref.kind}: its bytes do not have the sha256 {ref.sha256[:12]}… that it claims")
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            path.parent.mkdir(exist_ok=True)
            temporary.write_bytes(data)
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StorageError(f"media folder {self.root} cannot be written ({error.strerror})") from error

    def path(self, ref: MediaRef) -> Path:
        """The file that holds the bytes of `ref`, or would hold them.

        Raises:
            MediaError: the reference carries no sha256.
        """
        if len(ref.sha256) != 64 or not all(c in "0123456789abcdef" for c in ref.sha256):
            raise MediaError(f"not a sha256: {ref.sha256!r}")
        return self.root / ref.sha256[:2] / (ref.sha256 + ref.extension)

    def find(self, sha256: str, kind: Kind | None = None) -> MediaRef | None:
        """The reference of a stored item by the hash of its bytes; None: not in this store.

        Args:
            sha256: of the bytes.
            kind: what the item is to be, where its bytes can be several; bytes that cannot be this are found as what they are.

        Raises:
            MediaError: not a sha256, or the file cannot be read.
        """
        folder = self.path(MediaRef(sha256, "", 0)).parent
        found = [mime for mime, extension in EXTENSIONS.items() if (folder / (sha256 + extension)).exists()]
        if not found:
            return None
        mime = next((mime for mime in found if mime.startswith(f"{kind}/")), found[0])
        return probe((folder / (sha256 + EXTENSIONS[mime])).read_bytes(), mime.split("/", 1)[0])  # type: ignore[arg-type]

    def get(self, ref: MediaRef) -> bytes:
        """The stored bytes.

        Raises:
            MediaError: not in this store.
        """
        try:
            return self.path(ref).read_bytes()
        except FileNotFoundError as error:
            raise MediaError(f"{ref.kind} {ref.sha256[:12]} is not in {self.root}") from error

    def load(self, ref: MediaRef) -> Media:
        """A part that reads its bytes from this store."""
        return _part_class(ref)(ref, None, str(self.path(ref)))
