"""The learning rate: the peak is `lr`, the decay follows the warm-up, and a run that goes on goes on where the rate was."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax_server.training.schedule import Schedule

from relax_sdk import CheckpointError
from relax_sdk.config import OptimizerConfig

configs = st.builds(
    OptimizerConfig,
    lr=st.floats(1e-7, 1e-1),
    warmup_steps=st.integers(0, 60),
    decay=st.sampled_from(["linear", "constant"]),
    min_lr_ratio=st.floats(0, 1),
)


def rates(schedule: Schedule, begin: int = 0) -> list[float]:
    return [schedule.at(step) for step in range(begin, schedule.end)]


@pytest.mark.parametrize(
    ("config", "step", "total", "lr"),
    [
        (OptimizerConfig(lr=1.0, warmup_steps=10), 0, 101, 0.1),
        (OptimizerConfig(lr=1.0, warmup_steps=10), 9, 101, 1.0),
        (OptimizerConfig(lr=1.0, warmup_steps=11, min_lr_ratio=0.0), 55, 101, 0.5),
        (OptimizerConfig(lr=1.0, warmup_steps=0), 0, 100, 1.0),
        (OptimizerConfig(lr=1.0, warmup_steps=0, min_lr_ratio=0.2), 99, 100, 0.2),
        (OptimizerConfig(lr=1.0, warmup_steps=0, decay="constant"), 99, 100, 1.0),
        (OptimizerConfig(lr=1.0, warmup_steps=20), 1, 10, 1.0),  # a quarter of ten steps is two
        (OptimizerConfig(lr=1.0, warmup_steps=20), 0, 1, 1.0),
    ],
)
def test_the_rate_of_a_step(config: OptimizerConfig, step: int, total: int, lr: float) -> None:
    assert Schedule.of(config, total).at(step) == pytest.approx(lr)


@given(config=configs, total=st.integers(1, 300))
def test_the_warm_up_reaches_lr_and_the_decay_follows_it(config: OptimizerConfig, total: int) -> None:
    values = rates(Schedule.of(config, total))
    top = values.index(max(values))
    assert max(values) == config.lr
    assert top <= max(0, min(config.warmup_steps, total // 4) - 1)
    assert all(a < b for a, b in pairwise(values[: top + 1]))
    assert all(a >= b for a, b in pairwise(values[top:]))
    if config.decay == "linear" and total > 1:
        assert values[-1] == pytest.approx(config.lr * config.min_lr_ratio)


@given(config=configs, total=st.integers(1, 200), other=st.integers(1, 400), data=st.data())
def test_a_longer_or_shorter_run_goes_on_from_the_rate_reached(
    config: OptimizerConfig, total: int, other: int, data: st.DataObject
) -> None:
    step = data.draw(st.integers(1, min(total, other)))
    before = Schedule.of(config, total)
    after = before.going_on(config, other, step)
    if step == other:
        return
    reached, values = before.at(step - 1), rates(after, step)
    if other == total:
        assert after == before
    elif step >= before.rise:
        assert all(a >= b for a, b in pairwise([reached, *values]))
        if config.decay == "linear":  # in equal parts: no drop is larger than another
            assert values[-1] == pytest.approx(min(reached, config.lr * config.min_lr_ratio))
            drops = [a - b for a, b in pairwise([reached, *values])]
            assert max(drops) == pytest.approx(min(drops), rel=1e-6, abs=config.lr * 1e-9)
    else:
        assert max(values) == pytest.approx(config.lr)
    assert max(values) <= config.lr * (1 + 1e-12)


def test_extending_a_finished_run_does_not_raise_the_rate() -> None:
    config = OptimizerConfig(lr=1.0)
    done = Schedule.of(config, 200)
    assert done.at(199) == pytest.approx(0.05)
    assert rates(done.going_on(config, 400, 200), 200) == pytest.approx([0.05] * 200)


@given(config=configs, lr=st.floats(1e-7, 1e-1), step=st.integers(1, 99), total=st.integers(100, 300))
def test_another_lr_is_the_new_peak_and_is_reached_from_where_the_rate_is(
    config: OptimizerConfig, lr: float, step: int, total: int
) -> None:
    before = Schedule.of(config, 100)
    changed = OptimizerConfig(lr=lr, warmup_steps=config.warmup_steps, decay=config.decay, min_lr_ratio=config.min_lr_ratio)
    values = rates(before.going_on(changed, total, step), step)
    if lr == config.lr:
        return
    assert max(values) == lr
    reached = before.at(step - 1)
    rise = max(1, min(config.warmup_steps, (total - step) // 4))
    if lr > reached:
        assert values[0] - reached == pytest.approx((lr - reached) / rise)
        assert values.index(lr) == rise - 1
    else:
        assert values[0] == lr


@given(config=configs, totals=st.lists(st.integers(1, 200), min_size=2, max_size=5))
def test_a_run_may_be_extended_again_and_again(config: OptimizerConfig, totals: list[int]) -> None:
    schedule = Schedule.of(config, totals[0])
    for more in totals[1:]:
        end = schedule.end
        last = schedule.at(end - 1)
        schedule = Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))).going_on(config, end + more, end)
        assert schedule.at(end) <= last


@pytest.mark.parametrize("data", [{}, {"asked": [1, 2]}, {"asked": None, "begin": 0}])
def test_what_is_no_schedule_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="schedule"):
        Schedule.from_dict(data)
