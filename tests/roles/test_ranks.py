"""Whole runs whose trainer is several processes: any of them may be lost, and the run goes on as if none had been."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_runs import SHORT_STEPS, fit_watched, left_behind, trainer
from our_processes import children
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout

import relax_sdk as relax
from benchmarks.layouts import MEASURED

GROUPS = 4
"""Groups of a step in these runs."""


def send_signal(name: str, number: int) -> None:
    """Signal one rank of the trainer by its name."""
    (victim,) = [process for process, command in children().items() if name in command]
    victim.send_signal(number)


class InTurn:
    """Does something to one rank after another, each time two steps after the trainer is back."""

    def __init__(self, names: list[str], act: Callable[[str], Any]) -> None:
        self.left, self.act, self.next = names, act, 2

    def __call__(self, step: int) -> None:
        if self.left and step >= self.next:
            self.next = step + 3
            self.act(self.left.pop(0))


def all_trained_once(run: relax.Run, steps: int) -> dict[str, int]:
    """Every step was done, and no group was lost or trained on twice.

    Returns:
        The groups that the steps took, the different ones that were acked, and those that are leased still.
    """
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    told = {"taken": len(run.metrics) * GROUPS, "acked": counts.acked, "leased": counts.leased}
    assert [row["step"] for row in run.metrics] == list(range(1, steps + 1))
    assert told == {"taken": steps * GROUPS, "acked": steps * GROUPS, "leased": 0}
    assert not left_behind()
    return told


def test_killing_each_rank_loses_nothing_and_the_role_alone_starts_again(tmp_path: Path) -> None:
    in_turn = InTurn(["policy-1", "policy"], lambda name: send_signal(name, signal.SIGKILL))
    watch, run = fit_watched(trainer(tmp_path / "run", layout={"dp": 2}), 8, in_turn)
    assert not in_turn.left
    all_trained_once(run, 8)
    again = [warning for warning in watch.warnings if "starting it again" in warning]
    assert len(again) == 2 and all("the policy process ended (killed by SIGKILL" in warning for warning in again)
    status = json.loads((run.folder / "status.json").read_text())
    assert {"policy", "policy-1"} <= {role["name"] for role in status["roles"]}


def test_a_layout_that_cannot_be_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(relax.ConfigError, match=r"layout\.tp = 4: the model has 2 key and value heads, which 4 "):
        trainer(tmp_path / "run", layout={"tp": 4}).fit(steps=1, progress=False)
    assert not (tmp_path / "run" / "logs" / "policy.log").exists()


@pytest.mark.nightly
def test_a_rank_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_server.roles import main_roles

    def freeze(name: str) -> None:
        monkeypatch.setattr(main_roles, "SILENCE_SECONDS", 10.0)
        send_signal(name, signal.SIGSTOP)

    in_turn = InTurn(["policy-1", "policy"], freeze)
    _, run = fit_watched(trainer(tmp_path / "run", layout={"dp": 2}, training=SHORT_STEPS), 10, in_turn)
    assert not in_turn.left
    all_trained_once(run, 10)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_killing_each_of_four_ranks_ten_times_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    monkeypatch.setattr("relax_server.roles.restarts.MAX_RESTARTS", 40)
    killed: list[str] = []

    def kill(name: str) -> None:
        send_signal(name, signal.SIGKILL)
        killed.append(name)

    in_turn = InTurn(["policy", "policy-1", "policy-2", "policy-3"] * 10, kill)
    _, run = fit_watched(trainer(tmp_path / "run", layout={"dp": 2, "tp": 2}), 3 * 40 + 4, in_turn)
    assert not in_turn.left
    told = all_trained_once(run, 3 * 40 + 4)
    for name, times in Counter(killed).items():
        record_property(MEASURED, json.dumps({"layout": "dp=2, tp=2", "rank": name, "killed": times} | told))


@pytest.mark.nightly
def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    trainer(folder, layout={"dp": 2}).fit(steps=2, progress=False)
    changed = relax.Trainer.from_run(folder, change={"layout": {"dp": 1, "tp": 2}})
    all_trained_once(changed.fit(steps=4, resume=True, progress=False), 4)
    alone = relax.Trainer.from_run(folder, change={"layout": {"tp": 1}})
    all_trained_once(alone.fit(steps=6, resume=True, progress=False), 6)
    assert not (folder / "logs" / "policy-2.log").exists()
