"""How far a run is: its steps, the groups that they used up, and what the first one waits for."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

from relax_sdk.runtime import Job, Observer
from relax_server.journal.base import Journal
from relax_server.roles.figures import Figures, waited_for
from relax_server.roles.messages import StepDone


class Progress:
    """The account that the controller keeps of a run.

    Args:
        job: the run.
        journal: knows which groups were dropped.
        figures: get a row per step.
        observer: is shown what the first step waits for.
    """

    def __init__(self, job: Job, journal: Journal, figures: Figures, observer: Observer) -> None:
        self._journal, self._run, self._config = journal, job.folder.name, job.config
        self._figures, self._observer = figures, observer
        self.step = 0
        """Training steps that are done, and whose weights are loaded or being loaded."""
        self._trained = 0
        """The last step that the trainer told of; ahead of `step` while weights are loaded."""
        self._furthest = 0
        """The last step of all that were done, also before the trainer went back to a checkpoint."""
        self._in_hand: StepDone | None = None
        """A step whose weights are being loaded; its figures are written after that, or where a stop cuts it short."""
        self.dropped = 0
        """Groups that will never be trained on: too old, or set aside."""
        self._set_aside = 0
        """Groups set aside, as a training step fails on them; `dropped` counts them too."""
        self.stats: dict[str, Any] = {}
        """The rollout's last figures, as in `relax_server.rollout.RolloutStats`."""
        self._failures, self._failures_before = Counter[str](), Counter[str]()
        """Failed attempts by the name of their error: of the rollout that runs now, and of those before it."""
        self._waiting = ""
        """What the first step waits for, in words; empty from then on."""

    @property
    def consumed(self) -> int:
        """Groups inside the steps that are done, from the start of the run."""
        return self.step * self._config.rollout.groups_per_step

    # --------------------------------------------------------------------------------------------------------------- steps

    def trained(self, step: int) -> None:
        """The trainer tells of a step; others may have to be dealt with before it."""
        self._trained = step

    def take_in_hand(self, message: StepDone) -> bool:
        """Deal with a step now; whether no run of the trainer had come so far."""
        self.step, self._waiting, self._in_hand = message.step, "", message
        further = message.step > self._furthest
        self._furthest = max(message.step, self._furthest)
        return further

    @property
    def newest(self) -> bool:
        """Whether the trainer has told of no step after this one."""
        return self.step == self._trained

    def step_ended(self, pause: float, engines: int) -> None:
        """The step in hand is dealt with: its row is written.

        Args:
            pause: seconds that loading its weights took.
            engines: in the pool.
        """
        message, self._in_hand = self._in_hand, None
        assert message is not None
        self._write(message, pause, engines)

    def cut_short(self, unread: Iterable[Any], engines: int) -> None:
        """The run stops: steps that are trained, and inside the checkpoint, have their rows all the same.

        Args:
            unread: messages that were not dealt with.
            engines: in the pool.
        """
        for message in (self._in_hand, *unread):
            if isinstance(message, StepDone) and self._figures.begun:
                self.step = message.step
                self._write(message, 0.0, engines)

    def _write(self, message: StepDone, pause: float, engines: int) -> None:
        """One row of metrics: what the trainer told of a step, and how the run stands."""
        metrics = message.metrics | {"seconds_load": pause, "engines": engines}
        metrics |= {"dropped_total": self.dropped - self._set_aside, "set_aside_total": self._set_aside}
        metrics |= {f"rollout_{k}": v for k, v in self.stats.items() if isinstance(v, (int, float))}
        if failing := self.stats.get("failing_tasks"):
            metrics["rollout_failing_tasks"] = failing
        metrics["failures"] = dict(self._failures_before + self._failures)
        self._figures.add(message.step, metrics)

    # -------------------------------------------------------------------------------------------------------------- groups

    async def count_dropped(self) -> bool:
        """Look up how many groups were too old at their lease, or set aside; whether their number has changed."""
        counts = await asyncio.to_thread(self._journal.counts, self._run)
        before, self.dropped, self._set_aside = self.dropped, counts.given_up, counts.failed
        return self.dropped != before

    # ------------------------------------------------------------------------------------------------------------- waiting

    def wait(self, what: str) -> None:
        """Show what the first step waits for; empty: for nothing any more."""
        self._waiting = what
        if what:
            self._observer.stage(what)

    def report(self, stats: dict[str, Any]) -> None:
        """The rollout's figures are here: how far the episodes are that the first step waits for is shown."""
        failures = Counter[str](stats.get("failures", {}))
        if failures.total() < self._failures.total():  # the rollout was started again
            self._failures_before += self._failures
        self.stats, self._failures = stats, failures
        if self._waiting and (counts := waited_for(stats, self._config.rollout.groups_per_step)):
            self._observer.stage(f"{self._waiting}: {counts}")
