"""What a run says is kept in its folder, in whole lines, and passed on to whoever watches."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from elastic_run import Heard
from relax_server.roles.events import EventLog, RunEvent, read_events
from relax_server.roles.figures import Figures
from relax_server.roles.layout import RunLayout
from relax_server.roles.messages import Evaluated
from relax_server.roles.record import RunRecord
from relax_server.trackers import Tracker

from relax_sdk.config import RolloutConfig, RunConfig
from relax_sdk.evaluation import Evaluation
from relax_sdk.registry import EnvSpec
from relax_sdk.run import Run
from relax_sdk.runtime import Job

LONE = RunConfig("e", model="/models/qwen3", rollout=RolloutConfig(group_size=1))


def job(folder: Path, resume: bool = False) -> Job:
    return Job(EnvSpec("e", "test:Test", None, {}), LONE, folder, resume=resume)


def flat(step: int) -> dict[str, Any]:
    """A step that taught nothing."""
    return {"step": step, "reward": 0.0, "n_groups": 16, "zero_variance_groups": 16, "reward_min": 0.0, "reward_max": 0.0}


def events(folder: Path) -> list[dict[str, Any]]:
    return list(read_events(RunLayout(folder).events))


def test_all_that_a_run_says_is_kept_and_passed_on(tmp_path: Path) -> None:
    heard = Heard()
    record = RunRecord(job(tmp_path), heard)
    record.started()
    for counts in ("", ": 1 of 4", ": 2 of 4"):
        record.stage(f"waiting for the first groups{counts}")
    record.step(flat(1))
    record.warn("the policy process ended (exit code 1); starting it again", "restart", "policy")
    row = flat(1) | {"eval_reward": 0.5, "eval_ci95": 0.1}
    record.evaluated(row, Evaluation(0.5, 0.1, 8, failures={"EnvError": 2}), newest=flat(1))
    record.saved(1, tmp_path / "step_000001")
    record.ended(None, stopped=False)
    rows = events(tmp_path)
    kinds = [row["kind"] for row in rows]
    assert kinds == ["started", "finding", "stage", "restart", "evaluation", "checkpoint", "ended"]
    assert [row["n"] for row in rows] == [1, 2, 3, 4, 5, 6, 7] and rows[0]["time"] <= rows[-1]["time"]
    finding, restart, evaluation = rows[1], rows[3], rows[4]
    assert finding["level"] == "problem" and "group_size = 1" in finding["what"] and "to 2 or more" in finding["advice"]
    assert (restart["level"], restart["role"], restart["step"]) == ("note", "policy", 1)
    assert "0.500 ± 0.100 over 8 episodes, 2 failed" in evaluation["what"]
    assert "from a single one. Set rollout.group_size to 2" in heard.warnings[0], "what to do is a sentence of its own"
    assert heard.warnings[1] == restart["what"] and [row.get("eval_reward") for row in heard.steps] == [None, 0.5]


def test_a_run_that_learns_nothing_says_so_also_after_it_was_resumed(tmp_path: Path) -> None:
    layout, heard = RunLayout(tmp_path), Heard()
    for resume, steps in ((False, range(1, 8)), (True, range(6, 16))):
        record = RunRecord(job(tmp_path, resume), heard)
        figures = Figures(layout, record)
        record.started()
        figures.begin(steps[0] - 1)
        for step in steps:
            figures.add(step, flat(step))
        record.ended(None, stopped=False)
    found = [row for row in events(tmp_path) if "nothing was learnt" in row["what"]]
    assert [(row["step"], row["level"]) for row in found] == [(15, "problem")], "ten steps of one start, and only once"
    assert any(text.startswith("step 15: nothing was learnt in the last 10 steps") for text in heard.warnings)


def test_steps_inside_a_checkpoint_have_rows_though_nobody_wrote_them(tmp_path: Path) -> None:
    layout, heard = RunLayout(tmp_path), Heard()
    figures = Figures(layout, RunRecord(job(tmp_path), heard))
    figures.begin(0)
    for step in (1, 2, 3, 6):
        figures.add(step, flat(step))
    figures.close()
    with layout.metrics.open("a") as file:
        file.write('{"step": 7, "rew')
    written = Run(tmp_path, job(tmp_path).config).metrics
    told = [written[1], written[2] | {"time": 1.0}, flat(4) | {"time": 2.0}, flat(5) | {"time": 3.0}]
    again = Figures(layout, RunRecord(job(tmp_path, resume=True), heard))
    again.begin(5, told)
    again.evaluated(Evaluated(3, Evaluation(0.25, 0.0, 4), 1, 1), newest=5)
    again.add(6, flat(6))
    again.recover([told[0], flat(7) | {"time": 4.0}])  # the trainer alone has ended, between its checkpoint and its word
    rows = Run(tmp_path, job(tmp_path).config).metrics
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert ["tokens_per_second" in row for row in rows] == [True, True, True, False, False, True, False]
    assert rows[2]["time"] == 1.0, "the row was of an earlier try"
    assert rows[2]["eval_reward"] == 0.25 and rows[2]["reward"] == flat(3)["reward"], "an evaluation completes an older row"


class Rows(Tracker):
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self.shown.append((step, dict(figures).get("eval_reward")))

    def warning(self, step: int, text: str) -> None:
        self.shown.append((step, text.partition(":")[0]))


async def test_trackers_are_shown_rows_as_they_are_written_and_what_people_are_warned_of(tmp_path: Path) -> None:
    rows = Rows()
    record = RunRecord(job(tmp_path), Heard(), trackers={"rows": rows})
    record.started()
    figures = Figures(RunLayout(tmp_path), record)
    figures.begin(0)
    for step in (1, 2):
        figures.add(step, flat(step))
    record.warn("the policy process ended", "restart", "policy")
    record.stage("saving")
    figures.evaluated(Evaluated(1, Evaluation(0.25, 0.0, 4), 1, 1), newest=2)
    await record.trackers.close("done")
    lone = "rollout.group_size = 1"
    assert rows.shown == [(0, lone), (1, None), (2, None), (2, "the policy process ended"), (1, 0.25)]


def test_numbers_go_on_after_a_crash_and_a_cut_line_is_dropped(tmp_path: Path) -> None:
    path = RunLayout(tmp_path).events
    for _ in range(2):
        log = EventLog(path)
        log.add(RunEvent("warning", "a word " * 100, 3))
        log.close()
        with path.open("a") as file:
            file.write('{"n": 9, "ki')
    log = EventLog(path)
    log.add(RunEvent("ended", "done", 4))
    assert [row["n"] for row in events(tmp_path)] == [1, 2, 3]
    assert path.read_text().endswith("\n")
    log.close()


def test_a_full_disk_leaves_whole_lines_and_ends_the_run_at_its_next_step(tmp_path: Path, monkeypatch) -> None:
    record = RunRecord(job(tmp_path), Heard())
    record.stage("starting")
    pwrite = os.pwrite

    def full(fd: int, data: bytes, offset: int) -> int:
        if len(data) <= 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(fd, data[:-20], offset)

    monkeypatch.setattr(os, "pwrite", full)
    record.warn("something")
    with pytest.raises(OSError, match="No space left"):
        record.step(flat(1))
    assert [row["what"] for row in events(tmp_path)] == ["starting"]
    assert RunLayout(tmp_path).events.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize(
    ("error", "stopped", "kind", "level"),
    [(RuntimeError("no room"), False, "failed", "problem"), (RuntimeError("stopped at step 3"), True, "stopped", "note")],
)
def test_how_a_run_ended_is_kept(tmp_path: Path, error: Exception, stopped: bool, kind: str, level: str) -> None:
    record = RunRecord(job(tmp_path), Heard())
    record.ended(error, stopped)
    [row] = events(tmp_path)
    assert (row["kind"], row["what"], row["level"]) == (kind, str(error), level)


def test_an_evaluation_of_an_earlier_step_is_kept_with_its_own(tmp_path: Path) -> None:
    record = RunRecord(job(tmp_path), Heard())
    figures = Figures(RunLayout(tmp_path), record)
    figures.begin(0)
    for step in (1, 2):
        figures.add(step, flat(step))
    figures.evaluated(Evaluated(1, Evaluation(0.25, 0.0, 4), 1, 1), newest=2)
    assert [(row["kind"], row["step"]) for row in events(tmp_path)] == [("evaluation", 1)]


@pytest.mark.parametrize(("reward", "told"), [(0.55, []), (0.5, ["fell from 0.600 at step 10 to 0.500 at step 15"])])
def test_a_held_out_reward_that_comes_late_is_judged_with_its_own_step_and_interval(
    tmp_path: Path, reward: float, told: list[str]
) -> None:
    heard = Heard()
    record = RunRecord(job(tmp_path), heard)
    figures = Figures(RunLayout(tmp_path), record)
    figures.begin(0)
    for step in range(1, 18):
        figures.add(step, flat(step) | {"reward": step / 20, "reward_max": 1.0, "zero_variance_groups": 4})
        if step in (7, 12, 17):  # two steps late
            held_out = {7: 0.4, 12: 0.6, 17: reward}[step]
            figures.evaluated(Evaluated(step - 2, Evaluation(held_out, 0.03, 64), step - 2, step - 2), newest=step)
    shown = [(row["step"], row["eval_ci95"], row["eval_n"]) for row in heard.steps if "eval_reward" in row]
    assert shown == [(7, 0.03, 64), (12, 0.03, 64), (17, 0.03, 64)], "with the newest step, and its interval"
    found = [text for text in heard.warnings if "held-out" in text]
    assert len(found) == len(told) and all(words in text for words, text in zip(told, found, strict=True))
    assert all(text.startswith("step 17: ") for text in found)


def test_a_last_line_without_its_end_is_mended(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path)
    layout.metrics.write_text('{"step": 1, "time": 1.0}\n{"step": 2, "time": 2.0}')
    figures = Figures(layout, RunRecord(job(tmp_path, resume=True), Heard()))
    figures.begin(2)
    figures.add(3, flat(3))
    assert [row["step"] for row in Run(tmp_path, job(tmp_path).config).metrics] == [1, 2, 3]
