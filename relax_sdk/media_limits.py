"""What one image, sound or film may cost to hold and to decode."""

from __future__ import annotations

from dataclasses import dataclass

from relax_sdk.errors import MediaError


@dataclass(frozen=True)
class MediaLimits:
    """Limits of a single media item; `LIMITS` holds where none are named, and for all decoding."""

    max_bytes: int = 64 * 2**20
    max_pixels: int = 4096 * 4096
    """Width times height of an image or of one video frame."""
    max_seconds: float = 600.0
    """Duration of a sound or video."""
    max_frames: int = 18_000
    """Frames of a video."""
    max_film_pixels: int = 18_000 * 1920 * 1080
    """Width times height times frames of a video: what its decoder writes when it goes through all of it."""
    max_animation_pixels: int = 2**30
    """The same of a GIF, whose frames cannot be skipped."""
    max_samples: int = 120_000_000
    """Samples of a sound, all channels together."""
    max_channels: int = 32
    """Channels of a sound."""
    max_sampling_rate: int = 384_000
    """Hz."""

    def check_size(self, what: str, size: int) -> None:
        """Refuse an item of nothing, or of too many bytes.

        Raises:
            MediaError: so many.
        """
        if size < 1:
            raise MediaError(f"empty {what} (0 bytes)")
        if size > self.max_bytes:
            raise MediaError(f"{what} of {size:,} bytes, more than the limit of {self.max_bytes:,}")

    def check_pixels(self, what: str, width: int, height: int) -> None:
        """Refuse a picture without pixels, or with too many.

        Raises:
            MediaError: so many.
        """
        if width * height > self.max_pixels:
            raise MediaError(f"{what} of {width}x{height} pixels, more than the limit of {self.max_pixels:,}")
        if width < 1 or height < 1:
            raise MediaError(f"{what} of {width}x{height} pixels")

    def check_sound(self, samples: int, channels: int, sampling_rate: int) -> None:
        """Refuse a sound that is empty, too long, or too large.

        Args:
            samples: in one channel.
            channels: of the sound.
            sampling_rate: Hz.

        Raises:
            MediaError: which of them, and the limit.
        """
        if samples <= 0:
            raise MediaError("the sound holds a header but no samples")
        if not 0 < sampling_rate <= self.max_sampling_rate:
            raise MediaError(f"sound at {sampling_rate:,} Hz, more than the limit of {self.max_sampling_rate:,}")
        if channels > self.max_channels:
            raise MediaError(f"sound of {channels} channels, more than the limit of {self.max_channels}")
        self.check_seconds("sound", samples / sampling_rate)
        if samples * channels > self.max_samples:
            raise MediaError(
                f"sound of {samples:,} samples in {channels} channels, more than the limit of {self.max_samples:,}"
            )

    def check_seconds(self, what: str, seconds: float) -> None:
        """Refuse what takes too long.

        Raises:
            MediaError: so long.
        """
        if seconds > self.max_seconds:
            raise MediaError(f"{what} of {seconds:.1f} s, more than the limit of {self.max_seconds:g} s")

    def check_film(self, width: int, height: int, frames: int, animation: bool) -> None:
        """Refuse a film of too many frames, or of frames that are too many for their size.

        Args:
            width, height: of a frame, in pixels.
            frames: at least so many.
            animation: it is a GIF.

        Raises:
            MediaError: which of them, and the limit.
        """
        self.check_pixels("video frame", width, height)
        if frames > self.max_frames:
            raise MediaError(f"video of {frames:,} frames, more than the limit of {self.max_frames:,}")
        most = self.max_animation_pixels if animation else self.max_film_pixels
        if width * height * frames > most:
            raise MediaError(
                f"{'GIF' if animation else 'video'} of {frames:,} frames of {width}x{height} pixels, "
                f"{width * height * frames:,} in all, more than the limit of {most:,}; make it smaller or shorter"
            )


LIMITS = MediaLimits()
