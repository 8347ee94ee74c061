"""What a run's journal has recorded, read for people: trajectories by a filter, episodes and groups by their ids."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from relax_sdk.config import RunConfig
from relax_sdk.errors import ConfigError
from relax_sdk.recorded import RecordedTrajectory, TrajectoryFilter
from relax_sdk.trajectory import Group, Trajectory
from relax_server.journal import open_journal
from relax_server.journal.base import Journal
from relax_server.journal.finding import TrajectoryQuery, TrajectoryRow
from relax_server.roles.layout import RunLayout

LISTED = 6
"""Ids that an error names."""
MOST = 1_000_000
"""Episodes of a run that are looked through."""
AT_ONCE = 64
"""Trajectories whose groups are read together."""


@contextlib.contextmanager
def open_records(config: RunConfig, layout: RunLayout) -> Iterator[Journal]:
    """Open the journal that a run's episodes are in.

    Raises:
        ConfigError: there is none on this machine.
    """
    if config.ray.journal is None and not layout.journal.exists():
        raise ConfigError(
            f"{layout.folder} has no journal, so no episode of it is known; the episodes of a run that a service carries out "
            "are on the service"
        )
    journal = open_journal(config.ray.journal or layout.journal)
    try:
        yield journal
    finally:
        journal.close()


def read_trajectories(config: RunConfig, layout: RunLayout, wanted: TrajectoryFilter) -> list[RecordedTrajectory]:
    """Recorded trajectories of a run, see `relax_sdk.recorded.RecordReader`."""
    with open_records(config, layout) as journal:
        return list(iter_trajectories(journal, layout, wanted))


def iter_trajectories(
    journal: Journal, layout: RunLayout, wanted: TrajectoryFilter, played: bool = False
) -> Iterator[RecordedTrajectory]:
    """Recorded trajectories in the order that is wanted; a few groups are held at a time; `played`: none of the warm-up."""
    yield from _load(journal, layout, journal.find(layout.folder.name, _query(wanted, played)))


def iter_groups(
    journal: Journal, layout: RunLayout, wanted: TrajectoryFilter, played: bool = False
) -> Iterator[list[RecordedTrajectory]]:
    """As `iter_trajectories`, those of a group together."""
    rows = journal.find(layout.folder.name, _query(wanted, played))
    place = {id: i for i, id in enumerate(dict.fromkeys(row.group_id for row in rows))}
    together = _load(journal, layout, sorted(rows, key=lambda row: place[row.group_id]))
    for _, group in itertools.groupby(together, key=lambda t: t.group_id):
        yield list(group)


def _load(journal: Journal, layout: RunLayout, rows: Sequence[TrajectoryRow]) -> Iterator[RecordedTrajectory]:
    for start in range(0, len(rows), AT_ONCE):
        some = rows[start : start + AT_ONCE]
        found = {t.id: t for group in journal.fetch(list(dict.fromkeys(r.group_id for r in some))) for t in group.trajectories}
        yield from (recorded(found[row.id], row, layout) for row in some)


def count_examples(journal: Journal, layout: RunLayout, wanted: TrajectoryFilter) -> int:
    """How many examples of the warm-up are among what is wanted, whatever its limit."""
    return journal.count(layout.folder.name, dataclasses.replace(_query(wanted), split="warmup"))


def _query(wanted: TrajectoryFilter, played: bool = False) -> TrajectoryQuery:
    least, most = wanted.reward_range
    return TrajectoryQuery(
        split=wanted.split,
        played=played,
        statuses=wanted.statuses,
        reward_min=least,
        reward_max=most,
        task_index=wanted.task,
        step=wanted.step,
        text=wanted.text,
        sort=wanted.sort,
        limit=wanted.limit or MOST,
    )


def recorded(trajectory: Trajectory, row: TrajectoryRow | None, layout: RunLayout, split: str = "train") -> RecordedTrajectory:
    """A trajectory with what the journal's row says of it.

    Args:
        trajectory: whole.
        row: of it; None: nothing more is known.
        layout: of the run's folder, where its media are.
        split: where no row says it.
    """
    known: dict[str, Any] = {"split": split}
    if row is not None:
        known = {name: getattr(row, name) for name in ("split", "seq", "step", "advantage", "gap", "staleness")}
    return RecordedTrajectory(**vars(trajectory), **known, media_folder=str(layout.media))


def read_group(config: RunConfig, layout: RunLayout, id: str) -> Group:
    """A recorded group of a run, see `relax_sdk.recorded.RecordReader`."""
    run = layout.folder.name
    with open_records(config, layout) as journal:
        rows = journal.find(run, TrajectoryQuery(limit=MOST))
        episodes = {row.id: row.group_id for row in rows}
        wanted = _by_number(rows, id) or (id if id.startswith(f"{run}/") else f"{run}/{id}")
        found = episodes.get(wanted) or pick((row.group_id for row in rows), run, id, "group")
        (group,) = journal.fetch([found])
    about = {row.id: row for row in rows if row.group_id == found}
    return Group(group.id, group.env, group.task_index, [recorded(t, about.get(t.id), layout) for t in group.trajectories])


def read_episode(config: RunConfig, layout: RunLayout, episode: str) -> RecordedTrajectory:
    """The record of an episode.

    Args:
        config: of the run.
        layout: of its folder.
        episode: id, without the run's name if that is wanted, or a beginning that fits only one; or the number that lists and
            pages show, as `17` or `#17`.

    Raises:
        ConfigError: none or several fit; the message names the nearest.
    """
    run = layout.folder.name
    with open_records(config, layout) as journal:
        rows = {row.id: row for row in journal.find(run, TrajectoryQuery(limit=MOST))}
        id = _by_number(rows.values(), episode) or pick(rows, run, episode, "episode")
        return recorded(journal.trajectory(id), rows[id], layout)


def _by_number(rows: Iterable[TrajectoryRow], asked: str) -> str | None:
    """The id of the trajectory whose `seq` is asked for; None: that is no number, or no trajectory has it."""
    number = asked.removeprefix("#")
    return next((row.id for row in rows if number.isdecimal() and row.seq == int(number)), None)


def pick(ids: Iterable[str], run: str, asked: str, noun: str) -> str:
    """The id that is meant by an id without the run's name, or by a beginning.

    Raises:
        ConfigError: none or several fit; the message names the nearest.
    """
    known = dict.fromkeys(ids)
    wanted = asked if asked.startswith(f"{run}/") else f"{run}/{asked}"
    found = [wanted] if wanted in known else sorted(id for id in known if id.startswith(wanted))
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{len(found)} {noun}s of {run} begin with {asked!r}: {_listed(found)}")
    near = difflib.get_close_matches(wanted, known, n=LISTED, cutoff=0.0)
    raise ConfigError(f"{run} has no {noun} {asked!r}; the nearest of {len(known)}: {_listed(near) or 'there is none'}")


def _listed(ids: list[str]) -> str:
    return ", ".join(ids[:LISTED]) + (", …" if len(ids) > LISTED else "")
