"""The lease rules, as SQL inside one transaction: who may have a group, when a lease ends, what an ack needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, and_, bindparam, exists, func, literal, or_, select, update

from relax_sdk.errors import JournalError
from relax_server.journal.schema import GroupState, groups, payloads

CHUNK = 1000
"""Ids in one statement; a database allows some ten thousand."""


@dataclass(frozen=True)
class LeaseRequest:
    """A request for leases: by whom, when, and how old a group may be."""

    run: str
    consumer: str
    session: str
    """One opening of the journal; a consumer that died and came back has another."""
    now: float
    """Unix seconds."""
    oldest: int
    """The smallest `version_min` that is fresh enough."""

    def binds(self) -> dict[str, Any]:
        return {"the_run": self.run, "me": self.consumer, "here": self.session, "now": self.now, "oldest": self.oldest}


_g = groups.c
_ready = and_(_g.run == bindparam("the_run"), _g.state == GroupState.READY)
_leased = and_(_g.run == bindparam("the_run"), _g.state == GroupState.LEASED)
_elsewhere = or_(_g.consumer != bindparam("me"), _g.session != bindparam("here"))
_lapsed = and_(_leased, _g.lease_expires <= bindparam("now"), _elsewhere)
"""Leases that ended. One's own of this session are not among them: its holder lives, and no clock may serve it twice."""
_overlong = and_(_leased, _g.lease_expires > bindparam("now") + _g.lease_ttl)
"""Leases that end later than a lease granted now would: the clock was set back."""
_too_old = _g.version_min < bindparam("oldest")

_NO_LEASE = {"consumer": None, "session": None, "lease_expires": None, "lease_ttl": None}
_FREE = _NO_LEASE | {"state": GroupState.READY, "checkpoint": None}
_STALE = _NO_LEASE | {"state": GroupState.STALE}


def _count(condition: Any) -> Any:
    limited = select(literal(1)).where(condition).limit(bindparam("n")).subquery()
    return select(func.count()).select_from(limited).scalar_subquery()


_PROBE = select(
    _count(_ready) + _count(_lapsed) >= bindparam("n"),
    or_(exists().where(and_(_ready, _too_old)), exists().where(and_(_lapsed, _too_old)), exists().where(_overlong)),
)
_SHORTEN = update(groups).where(_overlong).values(lease_expires=bindparam("now") + _g.lease_ttl)
_DROP = update(groups).where(or_(_ready, _lapsed), _too_old).values(_STALE)
_OLDEST_READY, _OLDEST_LAPSED = (
    select(_g.seq).where(condition).order_by(_g.seq).limit(bindparam("n")) for condition in (_ready, _lapsed)
)
_COUNT_STATES = select(_g.state, func.count()).where(_g.run == bindparam("the_run")).group_by(_g.state)
_COUNT_ENDED = select(func.count()).where(_leased, _g.lease_expires <= bindparam("now"))


def anything_to_do(connection: Connection, asked: LeaseRequest, n: int) -> bool:
    """Whether `take` would change anything; costs a reader no lock, so that waiting consumers may ask often."""
    enough, outdated = connection.execute(_PROBE, asked.binds() | {"n": n}).one()
    return bool(enough or outdated)


def take(connection: Connection, asked: LeaseRequest, n: int, ttl: float) -> tuple[list[Row[*tuple[Any, ...]]], int]:
    """Lease the `n` oldest groups that are free and fresh, or none.

    Returns:
        Rows of (id, version_min, data) in order of commit, and how many groups were dropped as stale.
    """
    connection.execute(_SHORTEN, asked.binds())
    dropped = connection.execute(_DROP, asked.binds()).rowcount
    binds = asked.binds() | {"n": n}
    free = sorted(seq for query in (_OLDEST_READY, _OLDEST_LAPSED) for seq in connection.scalars(query, binds))[:n]
    if len(free) < n:
        return [], dropped
    for part in chunks(free):
        connection.execute(
            update(groups)
            .where(_g.seq.in_(part))
            .values(
                state=GroupState.LEASED,
                consumer=asked.consumer,
                session=asked.session,
                lease_expires=asked.now + ttl,
                lease_ttl=ttl,
            )
        )
    query = select(_g.id, _g.version_min, payloads.c.data).join(payloads, payloads.c.seq == _g.seq).order_by(_g.seq)
    return [row for part in chunks(free) for row in connection.execute(query.where(_g.seq.in_(part)))], dropped


def give_back(connection: Connection, ids: Sequence[str], run: str, consumer: str) -> int:
    """End leases of `consumer` at once; returns how many."""
    return _end(connection, ids, run, consumer, _FREE)


def drop(connection: Connection, ids: Sequence[str], run: str, consumer: str) -> int:
    """Mark groups that `consumer` holds as too old; returns how many."""
    return _end(connection, ids, run, consumer, _STALE)


def set_aside(connection: Connection, id: str, run: str, consumer: str, reason: str) -> int:
    """Mark a group that `consumer` holds as one that cannot be trained on; returns how many."""
    return _end(connection, [id], run, consumer, _NO_LEASE | {"state": GroupState.FAILED, "failure": reason})


def _end(connection: Connection, ids: Sequence[str], run: str, consumer: str, values: dict[str, Any]) -> int:
    count = 0
    for part in chunks(ids):
        held = and_(_g.id.in_(part), _g.run == run, _g.state == GroupState.LEASED, _g.consumer == consumer)
        count += connection.execute(update(groups).where(held).values(**values)).rowcount
    return count


def renew(connection: Connection, run: str, consumer: str, session: str, now: float, ttl: float) -> int:
    """Extend the leases that `consumer` took in `session`, also those that ended and that nobody took; returns how many."""
    held = and_(_g.run == run, _g.state == GroupState.LEASED, _g.consumer == consumer, _g.session == session)
    return connection.execute(update(groups).where(held).values(lease_expires=now + ttl, lease_ttl=ttl)).rowcount


def ack(connection: Connection, ids: Sequence[str], run: str, consumer: str, checkpoint: int) -> int:
    """Mark groups that `consumer` holds as contained in `checkpoint`; returns how many of `ids` are now acked.

    Raises:
        JournalError: one is not held by `consumer`; nothing is changed then.
    """
    wanted = list(dict.fromkeys(ids))
    query = select(_g.id, _g.seq, _g.state, _g.consumer, _g.checkpoint).where(_g.run == run)
    rows = {row.id: row for part in chunks(wanted) for row in connection.execute(query.where(_g.id.in_(part)))}
    held = []
    for id in wanted:
        row = rows.get(id)
        if row is None:
            raise JournalError(f"cannot ack group {id!r}: run {run!r} has none of this id")
        if row.consumer != consumer or row.state not in (GroupState.LEASED, GroupState.ACKED):
            raise JournalError(f"cannot ack group {id!r} for consumer {consumer!r}: {_whose(row)}")
        if row.state == GroupState.LEASED:
            held.append(row.seq)
        elif checkpoint < row.checkpoint:
            raise JournalError(
                f"cannot ack group {id!r} in checkpoint {checkpoint}: it is acked in checkpoint {row.checkpoint} already; "
                "a trainer that went back to an earlier checkpoint calls restore first"
            )
    for part in chunks(held):
        values = {"state": GroupState.ACKED, "checkpoint": checkpoint, "lease_expires": None, "lease_ttl": None}
        connection.execute(update(groups).where(_g.seq.in_(part)).values(**values))
    return len(wanted)


def restore(connection: Connection, run: str, consumer: str, checkpoint: int) -> int:
    """Free the leases of `consumer`, and all acks of the run that name a later checkpoint; returns how many."""
    leased = and_(_g.state == GroupState.LEASED, _g.consumer == consumer)
    later = and_(_g.state == GroupState.ACKED, _g.checkpoint > checkpoint)
    return connection.execute(update(groups).where(_g.run == run, or_(leased, later)).values(**_FREE)).rowcount


def count(connection: Connection, run: str, now: float) -> dict[GroupState, int]:
    """Groups by state; leases that ended are counted as ready."""
    found = {GroupState(state): number for state, number in connection.execute(_COUNT_STATES, {"the_run": run})}
    if found.get(GroupState.LEASED):
        ended = connection.execute(_COUNT_ENDED, {"the_run": run, "now": now}).scalar_one()
        found[GroupState.LEASED] -= ended
        found[GroupState.READY] = found.get(GroupState.READY, 0) + ended
    return found


def _whose(row: Any) -> str:
    if row.state == GroupState.LEASED:
        return f"its lease ended and {row.consumer!r} took it"
    if row.state == GroupState.ACKED:
        return f"{row.consumer!r} acked it in checkpoint {row.checkpoint}"
    if row.state == GroupState.READY:
        return "it is not leased; lease it first"
    if row.state == GroupState.STALE:
        return "it was dropped as too old"
    if row.state == GroupState.FAILED:
        return "it was set aside, as it cannot be trained on"
    return f"its state is {row.state!r}, and such a group is never leased"


def chunks(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """`items` in parts small enough for one statement."""
    for start in range(0, len(items), CHUNK):
        yield items[start : start + CHUNK]
