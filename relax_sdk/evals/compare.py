"""`compare_evaluations`: two evaluations of the same tasks, side by side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from relax_sdk.errors import ConfigError
from relax_sdk.evals.report import EvalEpisode, EvalReport, finite_data, succeeded, table
from relax_sdk.evals.statistics import Difference, paired_difference

SHOWN = 20
"""Flipped tasks that the text shows of each kind; the data have all."""
TOLD = ("env_version", "seed", "samples", "sampling.temperature", "rollout.max_turns", "rollout.max_tokens")
"""Settings whose difference is told, as it may be the cause."""

Tasks = Mapping[int, Sequence[EvalEpisode]]
"""Episodes that count, by task."""


@dataclass(frozen=True)
class Flip:
    """A task that one evaluation solved and the other did not."""

    task: int
    before: float
    """Mean reward of the first evaluation's samples."""
    after: float
    """Mean reward of the second evaluation's samples."""
    tags: tuple[str, ...]
    ids: tuple[str, str]
    """An episode of each, to be looked at."""


@dataclass(frozen=True)
class Comparison:
    """What is different between two evaluations; all differences are the second's less the first's, paired by task."""

    first: str
    second: str
    env: str
    split: str
    success: float
    tasks: int
    """Tasks that both have played and that count."""
    left_out: int
    """Tasks that one of them has not played, or of which no episode counts."""
    reward: Difference
    solved: Difference
    """Share of samples that succeed."""
    components: dict[str, Difference]
    by_tag: dict[str, Difference]
    """Reward by value of the first evaluation's column."""
    gained: list[Flip]
    """Tasks that only the second solves."""
    lost: list[Flip]
    """Tasks that only the first solves."""
    notes: list[str]
    """Settings that differ."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is not finite becomes None."""
        return finite_data(asdict(self))

    def to_markdown(self) -> str:
        """The comparison for people."""
        lines = [f"# {self.second} less {self.first}: {self.env} [{self.split}]", ""]
        lines += [f"{self.tasks} tasks that both have played; {self.left_out} left out.", *(f"Note: {n}" for n in self.notes)]
        head = ("", "difference", "95%", "")
        rows = [_row("reward", self.reward), _row("solved", self.solved)]
        lines += ["", *table(head, [*rows, *(_row(f"component {name}", d) for name, d in self.components.items())])]
        if self.by_tag:
            lines += ["", "## By tag (reward)", "", *table(head, [_row(tag, d) for tag, d in self.by_tag.items()])]
        for title, flips in ((f"Solved by {self.second} alone", self.gained), (f"Solved by {self.first} alone", self.lost)):
            lines += ["", f"## {title}: {len(flips)}", *_flips(flips)]
        lines += ["", f"A task is solved where half of its samples or more reach a reward of {self.success:g}."]
        return "\n".join([*lines, ""])

    def __str__(self) -> str:
        return self.to_markdown()


def compare_evaluations(first: EvalReport, second: EvalReport, success: float | None = None) -> Comparison:
    """Compare two evaluations of the same environment and split, task by task.

    A task's reward is the mean of its samples that count. Intervals are those of `paired_difference`: a paired bootstrap over
    the tasks that both have.

    Args:
        first: what is compared with.
        second: what is compared.
        success: reward from which on an episode has succeeded; default: the first evaluation's.

    Raises:
        ConfigError: they are of different environments or splits, or have no task in common.
    """
    for name in ("env", "split"):
        if getattr(first, name) != getattr(second, name):
            raise ConfigError(
                f"{first.name} has {name} {getattr(first, name)!r} and {second.name} has {getattr(second, name)!r}: "
                "only evaluations of the same tasks can be compared"
            )
    threshold = first.success if success is None else success
    before, after = _tasks(first), _tasks(second)
    common = sorted(before.keys() & after.keys())
    if not common:
        raise ConfigError(f"{first.name} and {second.name} have no task in common of which an episode of each counts")

    def difference(value: Callable[[EvalEpisode], float], tasks: Sequence[int] = common) -> Difference:
        return paired_difference([_mean(before[t], value) for t in tasks], [_mean(after[t], value) for t in tasks])

    def solved(episode: EvalEpisode) -> float:
        return float(succeeded(episode, threshold))

    names = dict.fromkeys(name for side in (before, after) for task in common for e in side[task] for name in e.rewards)
    tags = sorted({tag for task in common for tag in before[task][0].tags})
    flips = {t: _flip(t, before[t], after[t]) for t in common if _solves(before[t], solved) != _solves(after[t], solved)}
    return Comparison(
        first.name,
        second.name,
        first.env,
        first.split,
        threshold,
        len(common),
        len({e.task for report in (first, second) for e in report.episodes}) - len(common),
        difference(lambda e: e.reward),
        difference(solved),
        {name: difference(lambda e, name=name: e.rewards.get(name, 0.0)) for name in names},
        {tag: difference(lambda e: e.reward, [t for t in common if tag in before[t][0].tags]) for tag in tags},
        [flip for t, flip in flips.items() if _solves(after[t], solved)],
        [flip for t, flip in flips.items() if _solves(before[t], solved)],
        [
            f"{name} is {first.settings.get(name)!r} in {first.name} and {second.settings.get(name)!r} in {second.name}"
            for name in TOLD
            if first.settings.get(name) != second.settings.get(name)
        ],
    )


def _tasks(report: EvalReport) -> Tasks:
    tasks: defaultdict[int, list[EvalEpisode]] = defaultdict(list)
    for episode in report.episodes:
        if episode.failure is None:
            tasks[episode.task].append(episode)
    return dict(tasks)


def _mean(episodes: Sequence[EvalEpisode], value: Callable[[EvalEpisode], float]) -> float:
    return sum(map(value, episodes)) / len(episodes)


def _solves(episodes: Sequence[EvalEpisode], solved: Callable[[EvalEpisode], float]) -> bool:
    return _mean(episodes, solved) >= 0.5


def _flip(task: int, before: Sequence[EvalEpisode], after: Sequence[EvalEpisode]) -> Flip:
    means = (_mean(before, lambda e: e.reward), _mean(after, lambda e: e.reward))
    return Flip(task, *means, before[0].tags, (before[0].id, after[0].id))


def _row(name: str, found: Difference) -> tuple[str, str, str, str]:
    verdict = "better" if found.low > 0 else "worse" if found.high < 0 else "–"
    return name, f"{found.mean:+.3f}", f"{found.low:+.3f} … {found.high:+.3f}", verdict


def _flips(flips: Sequence[Flip]) -> list[str]:
    if not flips:
        return []
    rows = [(str(f.task), f"{f.before:.3f}", f"{f.after:.3f}", ", ".join(f.tags), *f.ids) for f in flips[:SHOWN]]
    more = [f"… and {len(flips) - SHOWN} more"] if len(flips) > SHOWN else []
    return ["", *table(("task", "first", "second", "tags", "first's episode", "second's episode"), rows), *more]
