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
    admission = Admission(config.batches_ahead, groups, config.steps)
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


@given(
    ahead=st.integers(0, 3),
    groups=st.integers(1, 4),
    steps=st.integers(1, 6),
    fates=st.lists(st.sampled_from(["kept", "failed", "dropped"]), max_size=12),
    goes_back=st.booleans(),
)
def test_as_many_groups_are_played_as_the_steps_need_and_one_for_each_that_is_lost(
    ahead: int, groups: int, steps: int, fates: list[str], goes_back: bool
) -> None:
    """Groups start whenever they may, and a batch is taken whenever there is one."""
    admission = Admission(ahead, groups, steps)
    fate, ready, played, lost, step = iter(fates), 0, 0, 0, 0
    while step < steps:
        while admission.open:
            how = next(fate, "kept")
            played += 1
            admission.committed += how != "failed"
            admission.dropped += how == "dropped"
            ready, lost = ready + (how == "kept"), lost + (how != "kept")
        assert ready >= groups, "the trainer would wait without end"
        ready, step = ready - groups, step + 1
        admission.consumed = step * groups
        if goes_back:  # to a checkpoint from before this step, whose groups are served again
            ready, step, admission.consumed, goes_back = ready + groups, step - 1, admission.consumed - groups, False
    assert played == steps * groups + lost
    assert ready == admission.outstanding == 0 and not admission.open
