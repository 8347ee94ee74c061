"""Autoscaling: the rule, and a run whose trainer waits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from relax_server.roles.autoscale import Autoscaler, Look, wanted_engines
from relax_server.roles.messages import RolloutReport, StepDone
from test_elastic import going

import relax_sdk as relax
from relax_sdk.config import AutoscaleConfig

RULE = AutoscaleConfig(max_engines=4, window=10.0, cooldown=20.0)


def looks(waiting: float, ready: int = 0, calls: int = 10, seconds: int = 30) -> list[Look]:
    """One look a second, of which a share saw the trainer wait."""
    return [Look(float(s), (s % 10) / 10 < waiting, ready, calls) for s in range(seconds + 1)]


@pytest.mark.parametrize(
    ("what", "engines", "wanted"),
    [
        (looks(0.5), 1, 2),
        (looks(0.5), 4, 4),
        (looks(0.5, ready=4), 1, 1),
        (looks(0.5, calls=1), 1, 1),
        (looks(0.2), 2, 2),
        (looks(0.0), 2, 2),
        (looks(0.0, ready=4), 2, 1),
        (looks(0.0, ready=4), 1, 1),
        (looks(0.2, ready=8), 2, 2),
        (looks(0.5, seconds=5), 1, 1),
        ([], 0, 1),
        ([], 9, 4),
    ],
    ids=[
        "waits: one more",
        "waits: not beyond the most",
        "waits, but a batch is ready",
        "waits, but there is no work for more engines",
        "waits a little: nothing",
        "does not wait, but no batch is ready",
        "does not wait, a batch is ready: one less",
        "never below the least",
        "between the thresholds",
        "the window is not filled",
        "below the least",
        "above the most",
    ],
)
def test_the_rule(what, engines, wanted):
    assert wanted_engines(RULE, what, engines, batch=4) == wanted


def test_nothing_changes_within_the_cool_down_and_what_was_before_a_change_does_not_count():
    assert wanted_engines(RULE, looks(0.5), 2, 4, changed_at=15.0) == 2
    assert wanted_engines(RULE, looks(0.5), 2, 4, changed_at=5.0) == 3


def test_engines_do_not_come_and_go_by_turns():
    """A run that needs 1.5 engines: with one the trainer waits, with two some groups wait."""
    engines, changed_at, counts = 1, 0.0, []
    seen: list[Look] = []
    for second in range(400):
        seen.append(Look(float(second), engines == 1 and second % 2 == 0, 3 if engines > 1 else 0, 20))
        wanted = wanted_engines(RULE, seen, engines, 4, changed_at)
        if wanted != engines:
            engines, changed_at = wanted, float(second)
            counts.append(engines)
    assert counts == [2]


def test_what_is_seen_at_the_end_of_steps_alone_does_not_count():
    """No call is in flight then, as where no episode may be played ahead; steps may be faster than the clock."""
    now, added = [0.0], list[str]()
    fleet: Any = SimpleNamespace(
        infos=[SimpleNamespace(state="current", external=False)], add=lambda: added.append("e2") or SimpleNamespace(id="e2")
    )
    scaler = Autoscaler(RULE, 4, fleet, lambda text: None, clock=lambda: now[0])
    for tenth in range(400):
        now[0] = tenth / 10
        calls = 0 if tenth % 10 else 20
        scaler.hear(StepDone(tenth, Path("weights")))
        stats = {"outstanding": 0, "in_flight": 0, "engines": [{"running": calls}]}
        scaler.hear(RolloutReport(stats, by_clock=tenth % 10 == 0))
        if added:
            break
    assert added == ["e2"]


def test_it_is_off_by_default_and_settings_that_cannot_work_are_refused():
    assert relax.Trainer("tone-v0").config.autoscale.max_engines == 0
    with pytest.raises(relax.ConfigError, match="engines = 3; autoscale allows 1 to 2"):
        relax.Trainer("tone-v0", engines=3, autoscale={"max_engines": 2})
    with pytest.raises(relax.ConfigError, match="needs mode='async'"):
        relax.Trainer("tone-v0", mode="colocate", autoscale={"max_engines": 2})
    with pytest.raises(relax.ConfigError, match=r"max_engines = 1; allowed: 0 \(off\), or min_engines \(2\) and more"):
        AutoscaleConfig(max_engines=1, min_engines=2)


@pytest.mark.nightly
async def test_a_run_whose_trainer_waits_gets_a_second_engine(tmp_path):
    slow = dict(
        rollout={"groups_per_step": 8, "group_size": 8, "max_turns": 1},
        sampling={"max_new_tokens": 48, "ignore_eos": True},
        max_staleness=0,
    )
    rule = {"max_engines": 2, "window": 5.0, "cooldown": 5.0, "wait_above": 0.2}
    async with going(tmp_path / "run", autoscale=rule, **slow) as run:
        await run.until(lambda: any("adding engine e2 to 1" in warning for warning in run.heard.warnings), 120)
        await run.engine("e2", "current")
        await run.until(lambda: run.heard.steps[-1]["engines"] == 2)
        await run.steps(1)
