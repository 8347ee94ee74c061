"""The records of steps are written in their order, behind the steps, and a failure is not lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from relax_server.journal.base import Journal
from relax_server.journal.trained import TrainedGroup
from relax_server.roles import token_records
from relax_server.roles.token_records import TokenRecords
from relax_server.training.batch import TokenBatch
from relax_server.training.samples import StepSamples
from relax_server.training.step_tokens import StepTokens

from relax_sdk.errors import JournalError
from relax_sdk.trajectory import Group, Sample, Trajectory

GROUPS = [Group("g", "e", 0, [])]


def tokens() -> StepTokens:
    """Two tokens of one sample."""
    sample = Sample([1, 2, 3], [0, 1, 1], [0.0, -1.0, -2.0], [-1, 0, 0], [-1, 0, 0], [])
    trajectory = cast(Trajectory, SimpleNamespace(id="t"))
    collected = StepSamples([sample], [trajectory], [0], [[0.5]], 0.0, 0.0, 0)
    trained = SimpleNamespace(sample=np.zeros(2, np.int64), logprob=np.array([-1.0, -2.0]))
    made = StepTokens(collected, cast(TokenBatch, SimpleNamespace(trained=_Sized(trained))), np.array([0.5, 0.5], np.float32))
    made.logprobs[:] = [-1.5, np.nan]
    return made


class _Sized(SimpleNamespace):
    def __init__(self, trained: Any) -> None:
        super().__init__(**vars(trained))

    def __len__(self) -> int:
        return len(self.sample)


class Kept:
    """A journal that takes its time."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.may = threading.Event()
        self.error: JournalError | None = None

    def record_trained(self, run: str, records: Sequence[TrainedGroup]) -> None:
        assert self.may.wait(20)
        if self.error is not None:
            raise self.error
        [record] = records
        [member] = record.trajectories
        assert (record.group_id, member.id, member.advantage, member.gap) == ("g", "t", 0.5, 0.5)
        self.steps.append(record.step)


def test_no_step_waits_for_its_record_and_a_checkpoint_waits_for_all() -> None:
    journal = Kept()
    records = TokenRecords(cast(Journal, journal), "run")
    for step in range(1, token_records.MAX_WAITING + 1):
        records.add(GROUPS, tokens(), step, step - 1)
    assert journal.steps == [], "all were added before one was written"
    threading.Timer(0.05, journal.may.set).start()
    records.add(GROUPS, tokens(), token_records.MAX_WAITING + 1, 0)
    assert journal.steps, "with so many to be written the next one waits"
    records.finish()
    assert journal.steps == [*range(1, token_records.MAX_WAITING + 2)]


def test_a_record_that_cannot_be_written_is_told_before_the_checkpoint() -> None:
    journal = Kept()
    journal.may.set()
    journal.error = JournalError("database or disk is full")
    records = TokenRecords(cast(Journal, journal), "run")
    records.add(GROUPS, tokens(), 1, 0)
    with pytest.raises(JournalError, match="full"):
        records.finish()
