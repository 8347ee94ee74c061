"""Recorded episodes scored again with today's rewards, and what moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from relax_sdk.config import RunConfig
from relax_sdk.env import Env
from relax_sdk.origin import load_origin
from relax_sdk.progress import Waiting
from relax_sdk.recorded import TrajectoryFilter
from relax_sdk.registry import EnvSpec
from relax_sdk.run import read_config
from relax_sdk.runtime import Job, Tell, find_runtime

EQUAL = 1e-9
"""Rewards that are apart by no more are equal."""


@dataclass(frozen=True)
class ScoreChange:
    """One episode's rewards as recorded, and as they are now."""

    id: str
    before: float
    now: float
    components_before: dict[str, float]
    components_now: dict[str, float]
    same_observations: bool = True
    """Whether the environment showed what it showed then."""

    @property
    def changed(self) -> bool:
        """Whether the reward moved."""
        return abs(self.now - self.before) > EQUAL


@dataclass(frozen=True)
class ComponentChange:
    """A reward component, or the whole reward, over all episodes that were scored again."""

    name: str
    before: float | None
    """Mean of the recorded values; None: no episode has the component."""
    now: float | None
    changed: int
    """Episodes in which it is another, or was or is not there."""


@dataclass(frozen=True)
class Rescored:
    """What came of scoring recorded episodes again."""

    run: str
    n: int
    """Episodes that were scored again."""
    changed: int
    """Those whose reward moved."""
    components: tuple[ComponentChange, ...]
    """The whole reward first, under the name `reward`."""
    movers: tuple[ScoreChange, ...]
    """The episodes that moved furthest, furthest first."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Episodes that were not scored again, by the reason."""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.run}: {self.n} episodes scored again, the reward of {self.changed} moved"]
        lines += [f"{'':<24}{'before':>10}{'now':>10}{'changed':>10}"]
        lines += [f"{c.name:<24}{_number(c.before):>10}{_number(c.now):>10}{c.changed:>10}" for c in self.components]
        if self.movers:
            lines += ["moved furthest:"]
        for mover in self.movers:
            lines.append(f"  {mover.id}: {mover.before:.3f} → {mover.now:.3f} ({_moved(mover)})")
        lines += [f"not scored again: {n} ({why})" for why, n in self.skipped.items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _moved(mover: ScoreChange) -> str:
    """The components that are not what they were, in words."""
    names = dict.fromkeys([*mover.components_before, *mover.components_now])
    pairs = [(name, mover.components_before.get(name), mover.components_now.get(name)) for name in names]
    told = [f"{name} {_number(was)} → {_number(now)}" for name, was, now in pairs if _differ(was, now)]
    return ", ".join(told) or "the components are the same: another weight"


def _differ(was: float | None, now: float | None) -> bool:
    return (was is None) != (now is None) or (was is not None and now is not None and abs(was - now) > EQUAL)


def summarise(
    run: str, scores: Sequence[ScoreChange], movers: int, skipped: dict[str, int], notes: Sequence[str] = ()
) -> Rescored:
    """The table of what moved.

    Args:
        run: its name.
        scores: of all episodes that were scored again.
        movers: episodes to name at most.
        skipped: episodes that were not scored again, by the reason.
        notes: what else is to be told.
    """
    names = dict.fromkeys(name for score in scores for name in (*score.components_before, *score.components_now))
    pairs = {"reward": [(score.before, score.now) for score in scores]}
    pairs |= {name: [(s.components_before.get(name), s.components_now.get(name)) for s in scores] for name in names}
    components = [
        ComponentChange(name, _mean([was for was, _ in both]), _mean([now for _, now in both]), sum(_differ(*p) for p in both))
        for name, both in pairs.items()
    ]
    moved = sorted((s for s in scores if s.changed), key=lambda s: (-abs(s.now - s.before), s.id))
    other = sum(not score.same_observations for score in scores)
    told: list[str] = []
    if other:
        who = "1 episode was" if other == 1 else f"{other} episodes were"
        told = [f"{who} shown something else than was recorded: answers given there are to other questions"]
    return Rescored(run, len(scores), len(moved), tuple(components), tuple(moved[:movers]), skipped, (*told, *notes))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


class Rescorer(Protocol):
    """Scores recorded episodes again; the `local` runtime does."""

    def rescore(self, job: Job, wanted: TrajectoryFilter, movers: int, tell: Tell) -> Rescored:
        """See the function of this name."""
        ...


def rescore(
    folder: str | Path,
    *,
    wanted: TrajectoryFilter | None = None,
    movers: int = 10,
    env: str | type[Env] | EnvSpec | None = None,
    progress: bool = True,
) -> Rescored:
    """Score recorded episodes of a run again, with the rewards that its environment has today. Nothing is generated or written.

    Each environment is made anew, reset with the recorded task and seed, and given the recorded actions, so that step rewards,
    reward functions, judges and group rewards are today's, and see what they saw then. Judges are asked again.

    Args:
        folder: of the run.
        wanted: which episodes; default: all that were scored.
        movers: episodes that are named at most, those whose reward moved furthest.
        env: the environment, in place of the one that the run's folder names.
        progress: show a live line.

    Raises:
        ConfigError: not a run folder, no episode to score, or episodes that a program of its own has played.
        RegistryError: the environment cannot be loaded.
    """
    home = Path(folder).resolve()
    config: RunConfig = read_config(home)
    spec, agent = load_origin(home, config.env, env)
    chosen = wanted or TrajectoryFilter(sort="oldest", limit=None)
    with Waiting(f"scoring {home.name} again", progress) as waiting:
        return cast(Rescorer, find_runtime("local")).rescore(Job(spec, config, home, agent), chosen, movers, waiting.tell)
