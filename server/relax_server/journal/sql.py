"""The journal in an SQL database."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, insert, select, update
from sqlalchemy.exc import SQLAlchemyError

from relax_sdk.errors import ConfigError, JournalError, UnstorableError
from relax_sdk.run_lock import Holder
from relax_sdk.storable import check_storable
from relax_sdk.trajectory import Group, Trajectory
from relax_server.journal import claims, finding, leases, migrate, owners, postgres, sqlite, trained
from relax_server.journal.base import JournalCounts, Lease, LeaseResult
from relax_server.journal.claims import Claimed, Held
from relax_server.journal.finding import GroupRow, MediaRow, TrajectoryQuery, TrajectoryRow
from relax_server.journal.flaws import check_group, flaw
from relax_server.journal.inserts import insert_group
from relax_server.journal.payload import pack, unpack
from relax_server.journal.schema import TRAIN, GroupState, groups, payloads, runs, state, trajectories
from relax_server.journal.trained import TrainedGroup

Clock = Callable[[], float]
"""Unix seconds."""

_GROUP_DATA = select(groups.c.id, payloads.c.data).join_from(groups, payloads, payloads.c.seq == groups.c.seq)


class SqlJournal:
    """`Journal` over SQLite or PostgreSQL; `leases.py` holds the lease rules.

    One instance serves all threads of a process; each process opens its own.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        claim: str | None = None,
        busy_timeout: float = 30.0,
        clock: Clock = time.time,
        read_only: bool = False,
    ) -> None:
        """Open the database, made and migrated as needed.

        Args:
            path: of a file, absolute, its folder exists; or a `postgresql://` URL.
            claim: `Holder.id` of the program that this process works for; see `claims.check`.
            busy_timeout: seconds to wait for another writer.
            clock: what leases and `created_at` go by.
            read_only: see `open_journal`.

        Raises:
            JournalError: it cannot be opened, is not a journal, or is newer than this code.
        """
        self.path = path
        self._database = postgres if str(path).startswith("postgresql") else sqlite
        self.name = postgres.shown(str(path)) if self._database is postgres else str(path)
        """The journal's name for people: the file, or the URL without its password."""
        self.shared = self._database is postgres
        """Whether processes on other machines may use it too."""
        self._busy_timeout = busy_timeout
        self._clock, self._claim = clock, claim
        self._owners: dict[str, str | None] = {}
        """Owners of the runs that were written to."""
        self._writing = threading.Lock()  # threads queue here, fairly, instead of polling SQLite's lock
        self._session = uuid.uuid4().hex
        self._closed = False
        self.engine: Engine = self._database.connect(str(path), busy_timeout, read_only)
        try:
            with self._explained("open it"):
                if read_only:
                    migrate.require_current(self.engine)
                else:
                    self._database.prepare(self.engine, busy_timeout)
                    migrate.upgrade(self.engine, write=self._database.WRITE)
        except BaseException:
            self.engine.dispose()
            raise

    # ------------------------------------------------------------------------------------------------------- writing

    def commit(self, group: Group, run: str, split: str = TRAIN, owner: str | None = None) -> bool:
        """See `Journal.commit`."""
        return self.commit_many([group], run, split, owner)[0]

    def commit_many(
        self, groups: Sequence[Group], run: str, split: str = TRAIN, owner: str | None = None, held: Held | None = None
    ) -> list[bool]:
        """See `Journal.commit_many`."""
        for group in groups:
            check_group(group, trained=split == TRAIN)
        payloads, now = [pack(group) for group in groups], self._clock()
        with self.writing("commit " + ", ".join(f"group {group.id!r}" for group in groups[:3])) as connection:
            if held is not None:
                claims.check(connection, held)
            self._require_owner(connection, run, owner, now)
            if self._claim is not None:  # groups that other programs commit do no harm: one of an id stays the first one
                claims.check(connection, Held(run, self._claim))
            new = [insert_group(connection, g, p, run, split, owner, now) for g, p in zip(groups, payloads, strict=True)]
        self._owners[run] = owner
        return new

    def lease(self, n: int, run: str, consumer: str, version: int, max_staleness: int, ttl: float) -> LeaseResult:
        """See `Journal.lease`."""
        if n < 1 or max_staleness < 0 or not 0 < ttl < math.inf:
            given = f"lease(n={n}, max_staleness={max_staleness}, ttl={ttl})"
            raise ConfigError(f"{given}; allowed: n 1 or more, max_staleness 0 or more, ttl above 0 seconds")
        asked = leases.LeaseRequest(run, consumer, self._session, self._clock(), version - max_staleness)
        with self.reading("lease groups") as connection:
            if not leases.anything_to_do(connection, asked, n):
                return LeaseResult([], 0)
        with self._leasing("lease groups", run) as connection:
            rows, dropped = leases.take(connection, asked, n, ttl)
        try:
            leased = [Lease(unpack(row.data, row.id), row.version_min, asked.now + ttl) for row in rows]
        except JournalError:
            with self._leasing("give back leases", run) as connection:
                leases.give_back(connection, [row.id for row in rows], run, consumer)
            raise
        return LeaseResult(leased, dropped)

    def renew(self, run: str, consumer: str, ttl: float) -> int:
        """See `Journal.renew`."""
        if not 0 < ttl < math.inf:
            raise ConfigError(f"renew(ttl={ttl}); allowed: above 0 seconds")
        with self._leasing("renew leases", run) as connection:
            return leases.renew(connection, run, consumer, self._session, self._clock(), ttl)

    def ack(self, group_ids: Sequence[str], run: str, consumer: str, checkpoint: int) -> int:
        """See `Journal.ack`."""
        with self._leasing("ack groups", run) as connection:
            return leases.ack(connection, group_ids, run, consumer, checkpoint)

    def release(self, group_ids: Sequence[str], run: str, consumer: str) -> int:
        """See `Journal.release`."""
        with self._leasing("give back leases", run) as connection:
            return leases.give_back(connection, group_ids, run, consumer)

    def drop(self, group_ids: Sequence[str], run: str, consumer: str) -> int:
        """See `Journal.drop`."""
        with self._leasing("drop stale groups", run) as connection:
            return leases.drop(connection, group_ids, run, consumer)

    def set_aside(self, group_id: str, run: str, consumer: str, reason: str) -> bool:
        """See `Journal.set_aside`."""
        with self._leasing("set a group aside", run) as connection:
            return bool(leases.set_aside(connection, group_id, run, consumer, reason))

    def restore(self, run: str, consumer: str, checkpoint: int) -> int:
        """See `Journal.restore`."""
        with self._leasing("restore groups", run) as connection:
            return leases.restore(connection, run, consumer, checkpoint)

    def record_trained(self, run: str, records: Sequence[TrainedGroup]) -> None:
        """See `Journal.record_trained`."""
        with self.writing("keep what a step made of its groups") as connection:
            trained.write(connection, run, records)

    def put_state(self, run: str, key: str, value: Any) -> None:
        """See `Journal.put_state`.

        Raises:
            JournalError: the value is not JSON.
        """
        try:
            check_storable(value, "it")
        except UnstorableError as error:
            raise UnstorableError(f"state {key!r} of run {run!r} must be JSON: {error}") from error
        with self.writing(f"keep state {key!r}") as connection:
            self._add_run(connection, run, self._clock())
            place = (state.c.run == run) & (state.c.key == key)
            if connection.execute(update(state).where(place).values(value=value)).rowcount == 0:
                connection.execute(insert(state).values(run=run, key=key, value=value))

    def known_owner(self, run: str) -> str | None:
        """Id of the key that a run belongs to, as far as this process has seen; it never blocks."""
        return self._owners.get(run)

    def own(self, run: str, owner: str) -> bool:
        """Use a run's name for a key, which makes the run its own if the name is new; False: it is another's."""
        with self.writing(f"use the name of run {run!r}") as connection:
            mine = owners.take(connection, run, owner, self._clock())
        if mine:
            self._owners[run] = owner
        return mine

    def claim(self, run: str, holder: Holder, instead_of: Claimed | None = None) -> Claimed | None:
        """See `Journal.claim`."""
        with self.writing(f"claim run {run!r}") as connection:
            self._add_run(connection, run, self._clock())
            return claims.take(connection, run, holder, instead_of)

    def beat(self, run: str, holder: Holder) -> bool:
        """See `Journal.beat`."""
        with self.writing(f"keep the claim of run {run!r}") as connection:
            return bool(claims.beat(connection, [run], holder))

    def end_claim(self, run: str, holder: Holder) -> None:
        """See `Journal.end_claim`."""
        with self.writing(f"give run {run!r} back") as connection:
            claims.end(connection, run, holder)

    # ------------------------------------------------------------------------------------------------------- reading

    def counts(self, run: str) -> JournalCounts:
        """See `Journal.counts`."""
        with self.reading("count groups") as connection:
            found = leases.count(connection, run, self._clock())
        found.pop(GroupState.RECORDED, None)
        return JournalCounts(**{str(state): number for state, number in found.items()})

    def failures(self, run: str) -> dict[str, str]:
        """See `Journal.failures`."""
        query = select(groups.c.id, groups.c.failure).where(groups.c.run == run, groups.c.state == GroupState.FAILED)
        with self.reading("list groups set aside") as connection:
            return {row.id: row.failure for row in connection.execute(query.order_by(groups.c.seq))}

    def task_indices(self, run: str) -> list[int]:
        """See `Journal.task_indices`."""
        query = select(groups.c.task_index).distinct().where(groups.c.run == run, groups.c.split == TRAIN)
        with self.reading("list task indices") as connection:
            return list(connection.scalars(query.order_by(groups.c.task_index)))

    def groups(self, run: str, split: str = TRAIN, limit: int = 100, newest_first: bool = True) -> list[Group]:
        """See `Journal.groups`."""
        query = _GROUP_DATA.where(groups.c.run == run, groups.c.split == split)
        query = query.order_by(groups.c.seq.desc() if newest_first else groups.c.seq).limit(limit)
        with self.reading("read groups") as connection:
            rows = connection.execute(query).all()
        return [unpack(row.data, row.id) for row in rows]

    def fetch(self, group_ids: Sequence[str]) -> list[Group]:
        """See `Journal.fetch`."""
        with self.reading("read groups") as connection:
            found = {row.id: row.data for part in leases.chunks(group_ids) for row in _rows_of(connection, part)}
        if unknown := [id for id in group_ids if id not in found]:
            raise JournalError(f"journal {self.name} has no group {unknown[0]!r}")
        return [unpack(found[id], id) for id in group_ids]

    def trajectory(self, id: str) -> Trajectory:
        """See `Journal.trajectory`."""
        found = self.owned_trajectory(id)
        if found is None:
            raise JournalError(f"journal {self.name} has no trajectory {id!r}")
        return found[0]

    def owned_trajectory(self, id: str) -> tuple[Trajectory, str | None] | None:
        """A trajectory and the id of the key that it was made for; None: it is unknown."""
        query = _GROUP_DATA.add_columns(trajectories.c.owner).join(trajectories, trajectories.c.group_id == groups.c.id)
        with self.reading(f"read trajectory {id!r}") as connection:
            row = connection.execute(query.where(trajectories.c.id == id)).first()
        if row is None:
            return None
        return next(t for t in unpack(row.data, row.id).trajectories if t.id == id), row.owner

    def trajectories(self, run: str, split: str | None = None, limit: int = 100, offset: int = 0) -> list[TrajectoryRow]:
        """See `Journal.trajectories`."""
        return self.find(run, TrajectoryQuery(split=split, limit=limit, offset=offset))

    def find(self, run: str, query: TrajectoryQuery) -> list[TrajectoryRow]:
        """See `Journal.find`."""
        with self.reading("find trajectories") as connection:
            return finding.find(connection, run, query)

    def count(self, run: str, query: TrajectoryQuery) -> int:
        """See `Journal.count`."""
        with self.reading("count trajectories") as connection:
            return finding.count(connection, run, query)

    def by_seq(self, seq: int) -> Trajectory:
        """See `Journal.by_seq`."""
        with self.reading(f"read trajectory {seq}") as connection:
            id = connection.scalar(select(trajectories.c.id).where(trajectories.c.seq == seq))
        if id is None:
            raise JournalError(f"journal {self.name} has no trajectory {seq}")
        return self.trajectory(id)

    def group_row(self, group_id: str) -> GroupRow:
        """See `Journal.group_row`."""
        with self.reading(f"read group {group_id!r}") as connection:
            found = finding.group_row(connection, group_id)
        if found is None:
            raise JournalError(f"journal {self.name} has no group {group_id!r}")
        return found

    def media(self, run: str, after: int = 0, limit: int = 1000) -> list[MediaRow]:
        """See `Journal.media`."""
        with self.reading("list media") as connection:
            return finding.list_media(connection, run, after, limit)

    def splits(self, run: str) -> dict[str, int]:
        """See `Journal.splits`."""
        with self.reading("count trajectories by split") as connection:
            return finding.splits(connection, run)

    def runs(self) -> list[str]:
        """See `Journal.runs`."""
        with self.reading("list runs") as connection:
            return list(connection.scalars(select(runs.c.id).order_by(runs.c.created_at, runs.c.id)))

    def trained(self, group_id: str) -> TrainedGroup | None:
        """See `Journal.trained`."""
        with self.reading(f"read how group {group_id!r} was trained on") as connection:
            return trained.read(connection, group_id)

    def get_state(self, run: str, key: str) -> Any:
        """See `Journal.get_state`."""
        with self.reading(f"read state {key!r}") as connection:
            return connection.scalar(select(state.c.value).where(state.c.run == run, state.c.key == key))

    def close(self) -> None:
        """See `Journal.close`."""
        self._closed = True
        self.engine.dispose()

    # -------------------------------------------------------------------------------------------------- transactions

    def _add_run(self, connection: Connection, run: str, now: float) -> None:
        if run not in self._owners and connection.scalar(select(runs.c.id).where(runs.c.id == run)) is None:
            connection.execute(insert(runs).values(id=run, created_at=now))

    def _require_owner(self, connection: Connection, run: str, owner: str | None, now: float) -> None:
        known = run in self._owners and self._owners[run] == owner
        if not known and not owners.take(connection, run, owner, now):
            raise JournalError(f"run {run!r} belongs to another key or training run; choose another name")

    @contextmanager
    def reading(self, doing: str) -> Iterator[Connection]:
        """A transaction that reads; errors say what it was doing."""
        with self._explained(doing), self.engine.connect() as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self, doing: str) -> Iterator[Connection]:
        """A transaction that writes, committed at the end of the block; errors say what it was doing."""
        with (
            self._explained(doing),
            self._writing,
            self.engine.connect().execution_options(**self._database.WRITE) as connection,
            connection.begin(),
        ):
            yield connection

    @contextmanager
    def _leasing(self, doing: str, run: str) -> Iterator[Connection]:
        """A transaction that writes to leases: for the program alone that carries the run out, where one does."""
        with self.writing(doing) as connection:
            claims.check(connection, Held(run, self._claim))
            yield connection

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        if self._closed:
            raise JournalError(f"cannot {doing}: journal {self.name} is closed; open it again")
        try:
            yield
        except (UnicodeError, OverflowError) as error:  # of a driver that cannot pass a value on
            raise UnstorableError(f"cannot {doing}: {error}") from error
        except SQLAlchemyError as error:
            raise flaw(error, doing) or self._database.explain(error, doing, self.name, self._busy_timeout) from error


def _rows_of(connection: Connection, group_ids: Sequence[str]) -> Sequence[Any]:
    return connection.execute(_GROUP_DATA.where(groups.c.id.in_(group_ids))).all()
