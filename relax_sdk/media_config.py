"""Configuration of how much of each medium a model is given."""

from __future__ import annotations

from dataclasses import dataclass

from relax_sdk.field_checks import check_types, require


@dataclass(frozen=True)
class MediaConfig:
    """Limits on what a model sees and hears of each item; what is None is as the model's own processor has it.

    Engine, trainer and environment prepare media by the same settings, so that all have the same tokens.
    `Trainer(env, media={"fps": 2, "max_frames": 64, "max_tokens": 4096})` looks twice a second at films.
    """

    fps: float | None = None
    """Frames of a film that are taken in a second."""
    max_frames: int | None = None
    """Frames of a film, at most."""
    max_tokens: int | None = None
    """Tokens of one item, at most. Pictures and frames are made smaller to fit; a longer sound is refused."""
    use_audio_in_video: bool = False
    """Whether a model that hears is given the sound of films too, interleaved with the frames by time."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("fps", "max_frames", "max_tokens"):
            value = getattr(self, name)
            require(value is None or value > 0, self, name, "above 0, or None")
        require(self.max_frames is None or self.max_frames >= 2, self, "max_frames", "2 or more, or None")
