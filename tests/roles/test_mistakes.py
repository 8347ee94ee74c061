"""Beginner's mistakes in whole runs: each is told within ten steps, in a line that names the mend."""

from __future__ import annotations

import pytest

from benchmarks.mistakes import HONEST, MISTAKES, WITHIN, false_alarms, tell


@pytest.mark.nightly
@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.name for mistake in MISTAKES])
def test_a_mistake_is_told_within_ten_steps(mistake):
    told = tell(mistake)
    assert told is not None, f"no line holds {mistake.mend}"
    assert told[0] <= WITHIN


@pytest.mark.nightly
@pytest.mark.parametrize("env", HONEST, ids=str)
def test_nothing_is_said_of_an_environment_that_is_well(env):
    assert false_alarms(env) == []
