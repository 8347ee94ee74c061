"""Autoscaling: how many engines a run should have, from how long the trainer waits and how many groups wait for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from relax_sdk.config import AutoscaleConfig
from relax_sdk.errors import RelaxError
from relax_server.roles.fleet import EngineFleet
from relax_server.roles.messages import BatchTaken, Beat, RolloutReport, Saved, StepDone

ENOUGH = 0.8
"""Share of the window that must be covered before anything is decided."""


@dataclass(frozen=True)
class Look:
    """The run at one moment."""

    at: float
    """Seconds, never going back."""
    waiting: bool
    """The trainer waits for groups."""
    ready: int
    """Groups that wait for the trainer."""
    calls: int
    """Calls in flight at all engines."""


def wanted_engines(
    rule: AutoscaleConfig, looks: Sequence[Look], engines: int, batch: int, changed_at: float = float("-inf")
) -> int:
    """How many engines there should be.

    One more, where the trainer waited for `wait_above` of the window or more, less than a batch was ready on average, and
    there were calls for more engines than there are. One less, where it waited for `wait_below` or less and a batch or more
    was ready. In between nothing changes, nor within `cooldown` seconds of a change, nor before the window is filled.

    Args:
        rule: the thresholds.
        looks: at the run, oldest first; those before the window, which ends with the last one, are not used.
        engines: that there are.
        batch: groups of one training step.
        changed_at: when the number of engines changed last; looks before it say nothing about those there are now.
    """
    bounded = min(max(engines, rule.min_engines), rule.max_engines)
    if not looks or bounded != engines:
        return bounded
    now = looks[-1].at
    seen = [look for look in looks if look.at >= max(now - rule.window, changed_at)]
    if now - changed_at < rule.cooldown or now - seen[0].at < ENOUGH * rule.window:
        return engines
    waited = sum(look.waiting for look in seen) / len(seen)
    ready = sum(look.ready for look in seen) / len(seen)
    calls = sum(look.calls for look in seen) / len(seen)
    if waited >= rule.wait_above and ready < batch and calls > engines:
        return min(engines + 1, rule.max_engines)
    if waited <= rule.wait_below and ready >= batch:
        return max(engines - 1, rule.min_engines)
    return engines


class Autoscaler:
    """Follows a run, and adds or removes engines as the rule says.

    Args:
        rule: off where `max_engines` is 0.
        batch: groups of one training step.
        fleet: of the run.
        tell: told of every change and why.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        rule: AutoscaleConfig,
        batch: int,
        fleet: EngineFleet,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rule, self.batch, self.fleet = rule, batch, fleet
        self._tell, self._clock = tell, clock
        self._looks: deque[Look] = deque()
        self._waiting = True
        self._changed_at = clock()
        self._count = 0

    def hear(self, message: Any) -> None:
        """Learn from a message of a role how the run goes; about once a second it is decided upon."""
        if not self.rule.max_engines:
            return
        if isinstance(message, BatchTaken):
            self._waiting = False
        elif isinstance(message, (StepDone, Saved)) or (isinstance(message, Beat) and message.waiting):
            self._waiting = True
        elif isinstance(message, RolloutReport) and message.by_clock:
            self._look(message.values)
            self._decide()

    def _look(self, stats: dict[str, Any]) -> None:
        committed = stats["outstanding"] - stats["in_flight"]
        ready = max(committed - (0 if self._waiting else self.batch), 0)  # the batch in training waits no more
        calls = sum(engine["running"] for engine in stats["engines"])
        self._looks.append(Look(self._clock(), self._waiting, ready, calls))
        while self._looks[0].at < self._looks[-1].at - self.rule.window:
            self._looks.popleft()

    def _decide(self) -> None:
        infos = self.fleet.infos
        count = sum(info.state == "current" for info in infos)
        if count != self._count:  # also where somebody else, or a loss, changed it
            self._count, self._changed_at = count, self._clock()
        if any(info.state in ("starting", "draining") or (info.state == "lost" and not info.external) for info in infos):
            return  # something is under way, or one could not be had, and no more are asked for
        wanted = wanted_engines(self.rule, self._looks, count, self.batch, self._changed_at)
        if wanted == count:
            return
        self._changed_at = self._clock()
        try:
            if wanted > count:
                added = self.fleet.add()
                self._tell(f"autoscale: the trainer waits for groups; adding engine {added.id} to {count}")
            else:
                last = [info for info in infos if info.state == "current" and not info.external][-1:]
                for info in last:
                    self.fleet.remove(info.id)
                    self._tell(f"autoscale: groups wait for the trainer; removing engine {info.id} of {count}")
        except RelaxError as error:
            self._tell(f"autoscale: {error}")
