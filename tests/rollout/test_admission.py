"""Admission: with rollouts as far ahead as they may be, no group is older than allowed when its batch is taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from relax_server.rollout.admission import Admission

from relax_sdk.config import AlgorithmConfig, RolloutConfig, RunConfig


@given(
    max_staleness=st.integers(0, 9),
    updates=st.integers(1, 4),
    groups=st.integers(4, 6),
    choices=st.lists(st.booleans(), min_size=50, max_size=400),
)
def test_staleness_is_held_in_optimizer_steps(max_staleness: int, updates: int, groups: int, choices: list[bool]) -> None:
    config = RunConfig(
        "tone-v0",
        max_staleness=max_staleness,
        algorithm=AlgorithmConfig(updates_per_batch=updates),
        rollout=RolloutConfig(groups_per_step=groups),
    )
    admission = Admission(config.batches_ahead, groups)
    step, ready, seen = 0, [], []
    for start in choices:  # whether the next thing to happen is a group that starts, or a batch that is taken
        if start and admission.open:
            ready.append(config.version_at(step))  # the weights that its first token is of
            admission.committed += 1
        elif len(ready) >= groups:
            seen += [config.version_at(step) - version for version in ready[:groups]]
            del ready[:groups]
            step += 1
            admission.consumed = step * groups
    assert all(staleness <= max_staleness for staleness in seen)
    assert all(staleness % updates == 0 for staleness in seen)
    assert len(ready) <= (max_staleness // updates + 1) * groups
