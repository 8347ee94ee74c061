"""The rows of one finished group: the group, its tokens, its trajectories, their texts and media."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sqlalchemy import Connection, insert, select
from sqlalchemy.exc import IntegrityError

from relax_sdk.errors import UnstorableError
from relax_sdk.trajectory import Group, Trajectory
from relax_server.journal import finding
from relax_server.journal.schema import TRAIN, GroupState, groups, payloads, texts, trajectories
from relax_server.journal.texts import spoken

ERROR_CHARACTERS = 300
"""Characters of an error that lists show."""


def insert_group(
    connection: Connection, group: Group, payload: bytes, run: str, split: str, owner: str | None, now: float
) -> bool:
    """Write the rows of one group; False when they are there already.

    Raises:
        UnstorableError: its id is taken in another run or split, or a trajectory's id is taken.
    """
    found = connection.execute(select(groups.c.run, groups.c.split).where(groups.c.id == group.id)).first()
    if found is not None:
        if tuple(found) != (run, split):
            raise UnstorableError(
                f"group id {group.id!r} is taken: run {found.run!r}, split {found.split!r} committed it; "
                f"give groups of run {run!r}, split {split!r} other ids"
            )
        return False
    row = _group_row(group, run, split, now)
    seq = connection.execute(insert(groups).returning(groups.c.seq), row).scalar_one()
    connection.execute(insert(payloads), {"seq": seq, "data": payload})
    try:
        if rows := [_trajectory_row(t, group, run, split, owner, now) for t in group.trajectories]:
            with _outlived(connection):
                returning = insert(trajectories).returning(trajectories.c.seq, sort_by_parameter_order=True)
                seqs = connection.execute(returning, rows).scalars().all()
            said = [{"seq": seq, "text": spoken(t)} for seq, t in zip(seqs, group.trajectories, strict=True)]
            connection.execute(insert(texts), said)
            finding.add_media(connection, run, list(zip(seqs, group.trajectories, strict=True)))
    except IntegrityError as error:
        raise _reused(connection, group) from error
    return True


def _outlived(connection: Connection) -> AbstractContextManager[Any]:
    """A statement whose failure leaves the transaction usable: PostgreSQL needs a savepoint for that."""
    return connection.begin_nested() if connection.dialect.name == "postgresql" else nullcontext()


def _group_row(group: Group, run: str, split: str, now: float) -> dict[str, Any]:
    first = GroupState.RECORDED
    if split == TRAIN:
        first = GroupState.READY if any(t.n_response_tokens for t in group.trajectories) else GroupState.EMPTY
    return {
        "id": group.id,
        "run": run,
        "split": split,
        "env": group.env,
        "task_index": group.task_index,
        "state": first,
        "version_min": group.version_min,
        "version_max": group.version_max,
        "created_at": now,
    }


def _trajectory_row(t: Trajectory, group: Group, run: str, split: str, owner: str | None, now: float) -> dict[str, Any]:
    return {
        "id": t.id,
        "group_id": group.id,
        "run": run,
        "split": split,
        "env": t.env,
        "task_index": t.task_index,
        "status": t.status,
        "reward": t.reward,
        "rewards": t.rewards,
        "version_min": t.version_min,
        "version_max": t.version_max,
        "n_tokens": t.n_response_tokens,
        "created_at": now,
        "owner": owner,
        "group_index": t.group_index,
        "turns": len(t.turns),
        "attempts": t.attempts,
        "error": t.error[:ERROR_CHARACTERS] if t.error is not None else None,
        "media": "+".join(sorted({ref.kind for turn in t.turns for ref in turn.media})),
    }


def _reused(connection: Connection, group: Group) -> UnstorableError:
    """The error that names which trajectory id of `group` was there before; asked inside the transaction that failed on it."""
    ids = [t.id for t in group.trajectories]
    query = select(trajectories.c.id, trajectories.c.group_id).where(trajectories.c.id.in_(ids))
    for row in connection.execute(query.where(trajectories.c.group_id != group.id)):
        return UnstorableError(
            f"trajectory id {row.id!r} of group {group.id!r} is taken: group {row.group_id!r} committed it; "
            "trajectory ids are unique in a journal"
        )
    twice = next(id for id in ids if ids.count(id) > 1)
    return UnstorableError(f"trajectory id {twice!r} occurs {ids.count(twice)} times in group {group.id!r}")
