"""The folder of an evaluation with its report and a blindness check, as `relax eval` and `relax check-senses` write them."""

from __future__ import annotations

import json
from pathlib import Path

from viewed_runs import make_run

from relax_sdk.evals.check import save
from relax_sdk.evals.plan import PLAN
from relax_sdk.evals.report import EvalEpisode, EvalReport
from relax_sdk.evals.senses import Condition, SensePass, SensesReport, SensesResults, Shown, judge

TASKS = 16
RIGHT = dict.fromkeys(range(TASKS), 1.0)
CHANCE = {task: float(task % 4 == 0) for task in range(TASKS)}


def make_judged(parent: Path, name: str = "judged") -> Path:
    """An evaluation of 8 tasks with two samples each, two of whose episodes failed, and a check whose sounds are not used."""
    folder = make_run(parent, name, steps=0, groups=1)
    (folder / PLAN).write_text(json.dumps({"env": "omni-v0"}))
    report().save(folder)
    save(senses(), folder)
    return folder


def report() -> EvalReport:
    """A report: the first of each pair of samples is right; low tasks are tagged `low`; the last task failed."""
    episodes = [_episode(task, sample) for task in range(8) for sample in range(2)]
    return EvalReport("judged", "omni-v0", "a-model", "eval", {"seed": 0}, 8, 1.0, "pitch", episodes)


def _episode(task: int, sample: int) -> EvalEpisode:
    failed, reward = task == 7, float(sample == 0)
    return EvalEpisode(
        *(f"judged/eval/0/{task}/{sample}", task, sample, "failed" if failed else "completed", 0.0 if failed else reward),
        rewards={} if failed else {"env": reward, "form": 0.5},
        failure="ValueError" if failed else None,
        error="ValueError: boom" if failed else None,
        tags=("low" if task < 4 else "high",),
    )


def senses() -> SensesReport:
    """Images are used; sounds are not, whose passes earn as much as those in which nothing is changed."""
    passes = [
        played("as it is", "all", RIGHT),
        played("another task's", "all", CHANCE),
        played("blanked", "all", CHANCE),
        *(played(condition, "image", CHANCE) for condition in ("blanked", "shuffled", "pairs")),
        *(played(condition, "audio", RIGHT) for condition in ("blanked", "shuffled", "pairs")),
    ]
    shown = [Shown(kind, TASKS, TASKS, 0, TASKS) for kind in ("audio", "image")]
    return judge(SensesResults("omni-v0", "a-model", "eval", TASKS, ["audio", "image"], shown, passes))


def played(condition: Condition, kind: str, rewards: dict[int, float]) -> SensePass:
    """A pass in which each answer is another one."""
    return SensePass(condition, kind, rewards, {task: f"{condition} {task}" for task in rewards})
