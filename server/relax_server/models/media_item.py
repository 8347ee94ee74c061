"""One media item as the towers of a model take it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Kind = Literal["image", "audio", "video"]
NO_TENSOR = np.empty((0,), np.float32)


@dataclass(frozen=True)
class MediaFeatures:
    """One media item as its tower sees it."""

    kind: Kind
    tensor: np.ndarray
    """float32; image and video: [n_patches, 3 * temporal * patch * patch]; audio: [n_mels, n_frames]; `NO_TENSOR` in an
    outline."""
    n_tokens: int
    """Placeholders after expansion, those of its sound included."""
    grid: tuple[int, int, int] | None = None
    """Patches (time, height, width) before the spatial merge; image and video."""
    second_per_grid: float | None = None
    """Seconds that one temporal patch spans; video."""
    times: tuple[float, ...] | None = None
    """Seconds at which each temporal patch is shown, where the model is told them; video."""
    sound: MediaFeatures | None = None
    """What is heard with a film, interleaved by time; its embeddings are after those of the pictures."""

    @property
    def n_visual(self) -> int:
        """Placeholders that are seen, not heard."""
        return 0 if self.grid is None else self.n_tokens - (0 if self.sound is None else self.sound.n_tokens)

    @property
    def heard(self) -> MediaFeatures | None:
        """What the audio tower takes: the sound itself, or that of a film; None: nothing."""
        return self if self.grid is None else self.sound
