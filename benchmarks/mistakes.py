"""Beginner's mistakes: is each told within ten steps, in one line that names the mend? And is nothing said of what is well?

python -m benchmarks.mistakes [NAME …]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import relax_sdk as relax
from benchmarks import mistaken_envs as envs
from benchmarks.report import save
from relax_sdk.findings import Finding
from relax_sdk.run import EVENTS

STEPS = 12
WITHIN = 10
"""Steps in which a mistake must be told."""
SMALL: dict[str, dict[str, Any]] = {
    "rollout": {"groups_per_step": 8, "group_size": 8, "max_turns": 3},
    "sampling": {"max_new_tokens": 1},
    "warmup": {"steps": 20, "batch_size": 8},
    "eval": {"every": 0, "limit": 8},
    "training": {"checkpoint_every": STEPS},
    "optimizer": {"lr": 1e-3},
    "algorithm": {"entropy_coef": 0.0, "kl_coef": 0.03},
}


@dataclass(frozen=True)
class Mistake:
    """One mistake, planted in a run that is well otherwise."""

    name: str
    env: type[relax.Env]
    mend: tuple[str, ...]
    """Words of the line that tells it, in any case."""
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    model: str = "relax/tiny-qwen3"


MISTAKES = (
    Mistake("reward compares another case", envs.OtherCase, ("nothing was learnt", ".strip().lower()")),
    Mistake("reward is always 1", envs.Generous, ("nothing was learnt", "let wrong ones earn less")),
    Mistake("no format_example", envs.NoExample, ("random weights", "define format_example")),
    Mistake("a group of one", envs.Copy, ("rollout.group_size = 1", "to 2 or more"), {"rollout": {"group_size": 1}}),
    Mistake("greedy sampling", envs.Copy, ("temperature = 0", "above 0"), {"sampling": {"temperature": 0.0}}),
    Mistake("answers are cut", envs.Wordy, ("max_new_tokens = 3", "raise"), {"sampling": {"max_new_tokens": 3}}),
    Mistake("no episode ends", envs.Endless, ("all episodes of the last", "rollout.max_turns = 3")),
    Mistake("members see different questions", envs.OwnDice, ("self.np_random",)),
    Mistake("one sound for all tasks", envs.OneSound, ("the same audio", "in `reset`"), model="relax/tiny-omni"),
    Mistake("a reward that never fires", envs.Polite, ("component 'polite'", "remove it")),
    Mistake("a learning rate for another world", envs.Copy, ("optimizer.lr = 0.5", "0.01 or less"), {"optimizer": {"lr": 0.5}}),
    Mistake("two rows are broken", envs.BrokenRows, ("failed attempts are of 2 of", "look at row")),
    Mistake("a slow environment", envs.Sleepy, ("an episode spends 1.0", "rollout.concurrency")),
    Mistake("three tasks", envs.ThreeTasks, ("only 3 training tasks", "register more")),
    Mistake("the question does not show the task", envs.Forgetful, ("same observation", "options['task']")),
)
HONEST = (envs.Copy, "tone-v0", "colour-v0", "motion-v0", "higher-lower-v0")
"""Environments of which nothing is to be said in their first steps."""


def merged(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The small settings with a mistake's own."""
    return {name: {**SMALL.get(name, {}), **settings.get(name, {})} for name in {*SMALL, *settings}}


def said(folder: Path, run: relax.Trainer) -> list[tuple[int, str]]:
    """Train for a few steps; all that is told besides how far it is: the step, and the line."""
    error = ""
    try:
        run.fit(STEPS, progress=False)
    except relax.RelaxError as raised:
        error = str(raised)
    lines = (folder / EVENTS).read_text().splitlines() if (folder / EVENTS).exists() else []
    events = [event for event in map(json.loads, lines) if event["kind"] in ("finding", "warning", "alarm", "failed")]
    told = [(event["step"], _line(event)) for event in events]
    return told if not error or any(error in line for _, line in told) else [*told, (0, error)]


def _line(event: Mapping[str, str]) -> str:
    """An event as the live output says it."""
    return Finding("note", event["what"], event["advice"]).sentence if event["advice"] else event["what"]


def tell(mistake: Mistake) -> tuple[int, str] | None:
    """Make a mistake; the step and the line that tells it, None where no line does."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        run = relax.Trainer(mistake.env, mistake.model, folder=folder, **merged(mistake.settings))
        lines = said(folder, run)
    return next(((step, line) for step, line in lines if all(words.lower() in line.lower() for words in mistake.mend)), None)


def false_alarms(env: Any) -> list[tuple[int, str]]:
    """What is said of an environment that is well: its own settings, except for the batch."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        if env is envs.Copy:
            run = relax.Trainer(env, "relax/tiny-qwen3", folder=folder, **merged({}))
        else:
            run = relax.Trainer(env, folder=folder, rollout={"groups_per_step": 8, "group_size": 8}, eval={"limit": 8})
        return said(folder, run)


def main(names: Sequence[str]) -> None:
    rows: list[dict[str, Any]] = []
    for mistake in MISTAKES:
        if not names or mistake.name in names:
            step, line = tell(mistake) or (None, None)
            in_time = step is not None and step <= WITHIN
            rows.append({"planted": mistake.name, "told at step": step, "as it should be": in_time, "line": line})
            print(f"{mistake.name}\n  step {step}: {line}", flush=True)
    for env in HONEST:
        name = env if isinstance(env, str) else env.__name__
        if not names or name in names:
            lines = [line for _, line in false_alarms(env)]
            rows.append({"planted": f"nothing, in {name}", "as it should be": not lines, "line": "; ".join(lines)})
            print(f"nothing, in {name}\n  {lines}", flush=True)
    save("mistakes", rows, key="planted", bars={"mistakes told within ten steps": 12})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of mistakes or honest environments; default: all")
    main(parser.parse_args().names)
