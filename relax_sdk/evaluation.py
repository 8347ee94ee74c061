"""`Evaluation`: what one greedy pass over a split gave."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Evaluation:
    """One greedy pass over a split."""

    mean_reward: float
    ci95: float
    """Half width of the 95% normal interval of the mean."""
    n: int
    """Episodes."""
    components: dict[str, float] = field(default_factory=dict)
    """Mean of every reward component."""
    failures: dict[str, int] = field(default_factory=dict)
    """Episodes that failed, by kind; they count with reward 0."""

    def __str__(self) -> str:
        failed = f", {sum(self.failures.values())} failed" if self.failures else ""
        return f"{self.mean_reward:.3f} ± {self.ci95:.3f} (n={self.n}{failed})"


@dataclass(frozen=True)
class Played:
    """Progress of an evaluation."""

    episodes: int
    of: int
    reward: float
    """Their sum; an episode that failed every time has 0."""

    def __str__(self) -> str:
        mean = f", mean reward {self.reward / self.episodes:.3f}" if self.episodes else ""
        return f"{self.episodes} of {self.of} episodes{mean}"
