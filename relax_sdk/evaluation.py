"""`Evaluation`: what one pass over a split gave."""

from __future__ import annotations

from dataclasses import dataclass, field

from relax_sdk.trajectory import Trajectory

BAR = 20
"""Characters of a progress bar."""


@dataclass(frozen=True)
class Evaluation:
    """One pass over a split. An episode that failed is not in its figures: it says nothing about the model."""

    mean_reward: float
    ci95: float
    """Half width of the 95% normal interval of the mean."""
    n: int
    """Episodes that the figures are of."""
    components: dict[str, float] = field(default_factory=dict)
    """Mean of every reward component."""
    failures: dict[str, int] = field(default_factory=dict)
    """Episodes that failed every time, by cause; they count nowhere else."""
    trajectories: list[Trajectory] = field(default_factory=list, repr=False)
    """All episodes, failed ones included; empty where an evaluation is one of many in a run, whose journal has them."""

    def __str__(self) -> str:
        failed = f", {sum(self.failures.values())} failed" if self.failures else ""
        return f"{self.mean_reward:.3f} ± {self.ci95:.3f} (n={self.n}{failed})"


@dataclass(frozen=True)
class Played:
    """Progress of an evaluation."""

    episodes: int
    """Episodes that are over, failed ones included."""
    of: int
    reward: float
    """Sum over those that did not fail."""
    failed: int = 0
    before: int = 0
    """Episodes that an earlier start played; they are in `episodes`."""
    seconds: float = 0.0
    """Since this start."""

    def __str__(self) -> str:
        full = BAR * self.episodes // self.of if self.of else BAR
        parts = [f"{'━' * full}{'─' * (BAR - full)} {self.episodes} of {self.of} episodes"]
        if self.episodes > self.failed:
            parts[0] += f", mean reward {self.reward / (self.episodes - self.failed):.3f}"
        if self.failed:
            parts.append(f"{self.failed} failed")
        now = self.episodes - self.before
        if now and self.seconds > 0:
            rate = now / self.seconds
            parts.append(f"{rate:.1f} a second")
            if self.episodes < self.of:
                parts.append(f"{(self.of - self.episodes) / rate:.0f} s left")
        return " · ".join(parts)
