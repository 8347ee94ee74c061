"""The learning rate of every step: a rise, a decay, and what becomes of them where a run goes on otherwise than it began."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from relax_sdk.config import OptimizerConfig
from relax_sdk.errors import CheckpointError

RISE_SHARE = 4
"""The warm-up takes at most one part in so many of the steps, so that a short run reaches `lr` and trains with it."""


@dataclass(frozen=True)
class Schedule:
    """The learning rate from step `begin` to step `end`; it is kept in checkpoints.

    The rate rises in equal parts from `start` to `peak` over `rise` steps, and falls then, if `decay` is `linear`, in equal
    parts to `floor` at the last step.
    """

    begin: int
    """0-based number of the first step."""
    end: int
    """Steps of the whole run; the last one is `end - 1`."""
    start: float
    """The rate before the first step."""
    peak: float
    rise: int
    """Steps; at 0 the rate falls from `start` on, which is then `peak`."""
    floor: float
    """The rate of the last step."""
    decay: Literal["linear", "constant"]
    asked: tuple[float, int, str, float]
    """`lr`, `warmup_steps`, `decay` and `min_lr_ratio` as they were configured."""

    @classmethod
    def of(cls, config: OptimizerConfig, total: int) -> Schedule:
        """The schedule of a run of `total` steps from its beginning."""
        rise = max(1, min(config.warmup_steps, total // RISE_SHARE))
        floor = config.lr * config.min_lr_ratio
        return cls(0, total, 0.0, config.lr, rise, floor, config.decay, _asked(config))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Schedule:
        """Read back `dataclasses.asdict`, also after JSON.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            values: dict[str, Any] = data | {"asked": tuple(data["asked"])}
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"the learning-rate schedule in the checkpoint cannot be read: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a checkpoint."""
        return dataclasses.asdict(self)

    def at(self, step: int) -> float:
        """Learning rate of 0-based `step`; `begin` or later."""
        done, n = step - self.begin + 1, self.end - self.begin
        if done <= self.rise:
            return self.peak if done == self.rise else self.start + (self.peak - self.start) * done / self.rise
        if self.decay == "constant":
            return self.peak
        if done >= n:
            return self.floor
        return self.peak - (self.peak - self.floor) * (done - self.rise) / (n - self.rise)

    def going_on(self, config: OptimizerConfig, total: int, step: int) -> Schedule:
        """The schedule of a run that goes on at `step`, for steps from there on.

        With the settings that it had it is the same schedule. With another number of steps the rate goes on from where it
        is, to the floor at the new end. Another `lr` is the new peak: the rate rises to it from where it is, over
        `warmup_steps`, or begins there if it is lower. The rate never jumps up.

        Args:
            config: as it is now.
            total: steps of the whole run, as it is now.
            step: 0-based number of the next step.
        """
        if (_asked(config), total) == (self.asked, self.end):
            return self
        if step == 0:
            return Schedule.of(config, total)
        reached = self.at(step - 1) if step > self.begin else self.start
        most = max(1, (total - step) // RISE_SHARE)
        floor = config.lr * config.min_lr_ratio
        if config.lr != self.asked[0]:
            start, peak = min(reached, config.lr), config.lr
            rise = max(1, min(config.warmup_steps, most)) if reached < peak else 1
        elif step < self.begin + self.rise:
            start, peak = reached, self.peak
            rise = min(self.begin + self.rise - step, most)
        else:
            start = peak = reached
            rise = 0
        return Schedule(step, total, start, peak, rise, min(floor, peak), config.decay, _asked(config))


def _asked(config: OptimizerConfig) -> tuple[float, int, str, float]:
    return config.lr, config.warmup_steps, config.decay, config.min_lr_ratio
