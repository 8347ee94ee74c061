"""`EvalReport`: the episodes of an evaluation and all that is computed from them; as JSON and as Markdown."""

from __future__ import annotations

import functools
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from relax_sdk.errors import ConfigError
from relax_sdk.evals.statistics import Estimate, clustered_mean, pass_at_k

REPORT, TEXT = "report.json", "report.md"
"""The two files of an evaluation's folder."""
FORMAT = 1
"""The version of `report.json`."""
EXACT = 1e-9
"""Rewards that are sums of parts miss a threshold by rounding alone; by so much they may."""


@dataclass(frozen=True)
class EvalEpisode:
    """One episode of an evaluation, without its messages and tokens."""

    id: str
    """The trajectory's id in the journal."""
    task: int
    """Index of the row in its split."""
    sample: int
    """0-based position among the samples of the task."""
    status: str
    reward: float
    rewards: dict[str, float] = field(default_factory=dict)
    """Components by name, unweighted."""
    failure: str | None = None
    """The name of the error that it failed with, such as `EngineUnavailable`; None: it counts."""
    error: str | None = None
    tags: tuple[str, ...] = ()
    """Values of the column that `--by` names."""
    tokens: int = 0
    """Response tokens; 0 behind an endpoint that does not tell them."""


@dataclass(frozen=True)
class Scores:
    """What some episodes of an evaluation add up to. Failed episodes count nowhere but in `failures`."""

    reward: Estimate
    pass_at: dict[int, Estimate]
    """pass@k by k, over the tasks with k samples or more that count."""
    components: dict[str, Estimate]
    failures: dict[str, int]
    """Failed episodes by cause."""
    tasks: int
    """Tasks with an episode that counts."""


def score_episodes(episodes: Iterable[EvalEpisode], success: float) -> Scores:
    """Mean reward, pass@k, components and failures.

    Args:
        episodes: of any tasks.
        success: reward from which on an episode has succeeded.
    """
    tasks: defaultdict[int, list[EvalEpisode]] = defaultdict(list)
    failures: Counter[str] = Counter()
    for episode in episodes:
        if episode.failure is not None:
            failures[episode.failure] += 1
        else:
            tasks[episode.task].append(episode)
    most = max(map(len, tasks.values()), default=0)
    names = dict.fromkeys(name for played in tasks.values() for episode in played for name in episode.rewards)
    return Scores(
        clustered_mean([[episode.reward for episode in played] for played in tasks.values()]),
        {k: _pass(tasks.values(), success, k) for k in _powers(most)},
        {name: clustered_mean([[e.rewards[name] for e in t if name in e.rewards] for t in tasks.values()]) for name in names},
        dict(failures.most_common()),
        len(tasks),
    )


def succeeded(episode: EvalEpisode, success: float) -> bool:
    """Whether an episode's reward reaches the threshold."""
    return episode.reward >= success - EXACT


def _pass(tasks: Iterable[Sequence[EvalEpisode]], success: float, k: int) -> Estimate:
    return clustered_mean([[pass_at_k(len(t), sum(succeeded(e, success) for e in t), k)] for t in tasks if len(t) >= k])


def _powers(most: int) -> list[int]:
    """1, 2, 4, … and the largest."""
    return sorted({2**power for power in range(most.bit_length())} | ({most} if most else set()))


@dataclass(frozen=True)
class EvalReport:
    """What an evaluation found.

    `print(report)` shows the Markdown that `report.md` has.
    """

    name: str
    env: str
    model: str
    split: str
    settings: dict[str, Any]
    """What was played, and how: what must be the same for the evaluation to go on."""
    of: int
    """Tasks that were asked for."""
    success: float
    by: str | None
    """The column of the task rows that `Scores` are also given by."""
    episodes: list[EvalEpisode] = field(repr=False)
    """By task and sample."""
    folder: Path | None = None

    @functools.cached_property
    def scores(self) -> Scores:
        """Figures of all episodes."""
        return score_episodes(self.episodes, self.success)

    @functools.cached_property
    def by_tag(self) -> dict[str, Scores]:
        """By value of the column `by`; a task with several values counts with each."""
        tags = sorted({tag for episode in self.episodes for tag in episode.tags})
        return {tag: score_episodes((e for e in self.episodes if tag in e.tags), self.success) for tag in tags}

    @property
    def complete(self) -> bool:
        """Whether each task was played."""
        return len({episode.task for episode in self.episodes}) == self.of

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is not finite becomes None."""
        out = {
            "format": FORMAT,
            "name": self.name,
            "env": self.env,
            "model": self.model,
            "split": self.split,
            "settings": self.settings,
            "of": self.of,
            "complete": self.complete,
            "success": self.success,
            "by": self.by,
            **asdict(self.scores),
            "by_tag": {tag: asdict(scores) for tag, scores in self.by_tag.items()},
            "episodes": [asdict(episode) for episode in self.episodes],
        }
        return finite_data(out)

    def save(self, folder: Path) -> None:
        """Write `report.json` and `report.md`, each whole or not at all.

        Raises:
            OSError: the folder cannot be written.
        """
        write_whole(folder / REPORT, json.dumps(self.to_dict(), indent=1))
        write_whole(folder / TEXT, self.to_markdown())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EvalReport:
        """Read a report.

        Args:
            path: the folder of an evaluation, or its `report.json`.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        file = Path(path) / REPORT if Path(path).is_dir() else Path(path)
        try:
            values = json.loads(file.read_text())
            episodes = [EvalEpisode(**{**e, "tags": tuple(e["tags"])}) for e in values["episodes"]]
            names = ("name", "env", "model", "split", "settings", "of", "success", "by")
            return cls(**{name: values[name] for name in names}, episodes=episodes, folder=file.parent)
        except FileNotFoundError as error:
            raise ConfigError(f"{path} holds no evaluation (there is no {file}); `relax eval` makes one") from error
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{file} is not the report of an evaluation ({error!r})") from error

    def to_markdown(self) -> str:
        """The report for people."""
        scores = self.scores
        failed = sum(scores.failures.values())
        played = f"{len(self.episodes)} episodes of {len({e.task for e in self.episodes})} of {self.of} tasks"
        lines = [f"# {self.env} [{self.split}] with {self.model}", "", f"{played}; {failed} failed and count nowhere below."]
        if not self.complete:
            lines += ["", "**Not complete**: the same command goes on where it ended."]
        rows = [("reward", scores.reward), *((f"pass@{k}", value) for k, value in scores.pass_at.items())]
        lines += ["", *table(("", "mean", "± 95%", "n"), [(name, *_cells(value)) for name, value in rows])]
        lines += ["", f"An episode succeeds with a reward of {self.success:g} or more."]
        if scores.components:
            parts = [(name, *_cells(value)) for name, value in scores.components.items()]
            lines += ["", "## By reward component", "", *table(("component", "mean", "± 95%", "n"), parts)]
        if self.by_tag:
            tags = [_tag_row(tag, found) for tag, found in self.by_tag.items()]
            lines += ["", f"## By {self.by}", "", *table((str(self.by), "reward", "± 95%", "pass@1", "tasks", "failed"), tags)]
        if scores.failures:
            causes = [(cause, str(count), _one_line(self._error_of(cause))) for cause, count in scores.failures.items()]
            lines += ["", "## Failed", "", *table(("cause", "episodes", "for example"), causes)]
        return "\n".join([*lines, ""])

    def _error_of(self, cause: str) -> str:
        return next((e.error or "" for e in self.episodes if e.failure == cause), "")

    def __str__(self) -> str:
        return self.to_markdown()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, its columns aligned; the first column is text, the others are numbers."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = [f"{cell:<{w}}" if i == 0 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(("-" * (w + 2)) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return [line(cells[0]), rule, *map(line, cells[1:])]


def finite_data(value: Any) -> Any:
    """Plain data as JSON has it: None in place of numbers that are not finite, text as keys."""
    if isinstance(value, Mapping):
        return {str(key): finite_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_data(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it sees all of the old text or all of the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _cells(value: Estimate) -> tuple[str, str, str]:
    return _number(value.mean), _number(value.ci95), str(value.n)


def _tag_row(tag: str, scores: Scores) -> tuple[str, ...]:
    once = scores.pass_at[1].mean if 1 in scores.pass_at else math.nan
    failed = str(sum(scores.failures.values()))
    return (tag, _number(scores.reward.mean), _number(scores.reward.ci95), _number(once), str(scores.tasks), failed)


def _number(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def _one_line(text: str) -> str:
    short = " ".join(text.split()).replace("|", "\\|")
    return short if len(short) <= 160 else f"{short[:159]}…"
