"""Rollouts: groups of episodes that the service plays by itself, and tells of as they finish."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from relax_sdk.errors import ConfigError, JournalError, RelaxError
from relax_sdk.tasks import TaskSplit
from relax_server.api.core import DATABASE_LIMIT, ServiceCore
from relax_server.api.errors import ApiError, bad, unknown
from relax_server.api.keys import Key
from relax_server.api.pausing import Gate
from relax_server.api.schemas import RolloutBody
from relax_server.journal.schema import rollouts, trajectories
from relax_server.log_ids import add_ids
from relax_server.rollout.context import RolloutContext
from relax_server.rollout.group import GroupResult, GroupTask, play_group

ACTIVE = ("queued", "running", "paused")
AHEAD = 64
"""Groups of one rollout that are begun at once; the places for episodes are shared between keys all the same."""


@dataclass
class Rollout:
    """One submission."""

    id: str
    key: str
    """Id of the key that submitted it."""
    request: dict[str, Any]
    state: str
    """`queued`, `running`, `paused`, `completed`, `failed` or `cancelled`."""
    counts: dict[str, int]
    """`groups` in all, `done`, `unusable`, and `trajectories`."""
    error: str | None
    created_at: float
    ended_at: float | None = None

    @property
    def topic(self) -> str:
        """Of its events."""
        return f"rollout/{self.id}"


class RolloutHub:
    """All rollouts of the service; those that a crash interrupted go on where the journal ends.

    Args:
        core: of the service.
    """

    def __init__(self, core: ServiceCore) -> None:
        self.core = core
        self._playing: dict[str, tuple[Rollout, asyncio.Task[None]]] = {}
        self._gates: dict[str, Gate] = {}

    @property
    def playing(self) -> int:
        """Rollouts under way."""
        return len(self._playing)

    @property
    def topics(self) -> list[str]:
        """Of the events of rollouts under way."""
        return [rollout.topic for rollout, _ in self._playing.values()]

    async def submit(self, body: RolloutBody, key: Key, idempotency_key: str | None) -> tuple[Rollout, bool]:
        """Begin a rollout; the same idempotency key gives the same rollout.

        Returns:
            It, and whether it is new.

        Raises:
            ApiError: unknown environment or tasks, no quota, or the idempotency key was used for something else.
            ConfigError: settings outside their range.
        """
        core = self.core
        if core.draining:
            raise ApiError(503, "the service is shutting down; go to another one", "draining", headers={"Retry-After": "5"})
        core.rates.check(key)
        spec = core.spec(body.env)
        splits = await core.splits(spec)
        if body.split not in splits:
            raise bad(f"{spec.id} has no split {body.split!r}; there are {', '.join(splits)}", "split")
        self._context(body, key, core.gate)  # what cannot be played is refused now
        request = body.model_dump(exclude_none=True)
        indices = _indices(body, splits[body.split])
        row: dict[str, Any] = dict(id=f"r_{secrets.token_hex(8)}", key=key.id, idempotency_key=idempotency_key)
        counts = {"groups": len(indices), "done": 0, "unusable": 0, "trajectories": 0}
        row |= dict(request=request, state="queued", counts=counts, created_at=time.time())
        rollout, new = await core.ask(self._insert, row)
        if not new and rollout.request != request:
            message = f"Idempotency-Key {idempotency_key!r} was used for another request, rollout {rollout.id}"
            raise ApiError(409, message, "idempotency_conflict", "Idempotency-Key")
        if new:
            core.events.add(rollout.topic, "queued", groups=len(indices))
            self._begin(rollout, key)
        return rollout, new

    async def resume(self) -> int:
        """Go on with what was under way when the service ended; returns how many."""
        core = self.core

        def read() -> list[tuple[Rollout, Key | None]]:
            with core.journal.reading("find unfinished rollouts") as connection:
                rows = connection.execute(select(rollouts).where(rollouts.c.state.in_(ACTIVE))).mappings().all()
            return [(_rollout(row), core.keys.by_id(row["key"])) for row in rows]

        found = await core.ask(read)
        for rollout, key in found:
            if key is None:
                await self._end(rollout, "cancelled", "its key was revoked or has expired")
            else:
                self._begin(rollout, key)
        return len(found)

    async def get(self, id: str, key: Key) -> Rollout:
        """A rollout of this key, or any for an admin.

        Raises:
            ApiError: there is none.
        """

        def read() -> Rollout | None:
            with self.core.journal.reading(f"read rollout {id}") as connection:
                row = connection.execute(select(rollouts).where(rollouts.c.id == id)).mappings().first()
                return _rollout(row) if row is not None else None

        playing = self._playing.get(id)
        rollout = playing[0] if playing is not None else await self.core.ask(read)
        if rollout is None or (rollout.key != key.id and not key.may("admin")):
            raise unknown("rollout", id)
        return rollout

    async def list(self, key: Key, limit: int) -> list[Rollout]:
        """The rollouts of a key, newest first; all for an admin."""

        def read() -> list[Rollout]:
            query = select(rollouts).order_by(rollouts.c.created_at.desc()).limit(limit)
            if not key.may("admin"):
                query = query.where(rollouts.c.key == key.id)
            with self.core.journal.reading("list rollouts") as connection:
                return [_rollout(row) for row in connection.execute(query).mappings()]

        return await self.core.ask(read)

    async def cancel(self, rollout: Rollout) -> Rollout:
        """End it; generation in flight is aborted, groups that are durable stay."""
        playing = self._playing.get(rollout.id)
        if playing is not None:
            rollout, task = playing
            task.cancel()
            await asyncio.wait({task}, timeout=DATABASE_LIMIT)
        if rollout.state in ACTIVE:
            await self._end(rollout, "cancelled", None)
        return rollout

    async def pause(self, rollout: Rollout) -> Rollout:
        """Begin no episode of it and send no model call until `unpause`; what is under way ends. Again changes nothing.

        Raises:
            ApiError: it is over.
        """
        return await self._switch(rollout, "paused", "paused")

    async def unpause(self, rollout: Rollout) -> Rollout:
        """Go on with it; one that is not paused is left as it is.

        Raises:
            ApiError: it is over.
        """
        return await self._switch(rollout, "running", "resumed")

    async def _switch(self, rollout: Rollout, state: str, kind: str) -> Rollout:
        if rollout.state not in ACTIVE:
            raise ApiError(409, f"rollout {rollout.id} is over ({rollout.state})", "rollout_over")
        if (rollout.state == "paused") != (state == "paused"):
            gate = self._gates[rollout.id]
            gate.clear() if state == "paused" else gate.set()
            await self._save(rollout, state)
            self.core.events.add(rollout.topic, kind, by="rollout")
        return rollout

    async def close(self) -> None:
        """Stop playing; what was under way goes on when the service is started again."""
        tasks = [task for _, task in self._playing.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=DATABASE_LIMIT)

    # ------------------------------------------------------------------------------------------------------- playing

    def _begin(self, rollout: Rollout, key: Key) -> None:
        gate = self._gates[rollout.id] = Gate(self.core.gate)
        if rollout.state == "paused":
            gate.clear()
        task = asyncio.get_running_loop().create_task(self._play(rollout, key))
        self._playing[rollout.id] = rollout, task
        task.add_done_callback(lambda _: self._forget(rollout.id))

    def _forget(self, id: str) -> None:
        self._playing.pop(id, None)
        self._gates.pop(id, None)

    def _context(self, body: RolloutBody, key: Key, gate: Gate) -> RolloutContext:
        config = self.core.rollout_config(
            body.limits.model_dump(exclude_none=True)
            | {"group_size": body.group_size, "on_failure": body.on_failure, "max_retries": body.max_retries}
        )
        return self.core.context(body.run or "rollouts", self.core.spec(body.env), config, key, gate=gate)

    async def _play(self, rollout: Rollout, key: Key) -> None:
        core = self.core
        add_ids(rollout=rollout.id, key=key.id)
        try:
            body = RolloutBody.model_validate(rollout.request)
            splits = await core.splits(core.spec(body.env))
            context = self._context(body, key, self._gates[rollout.id])
            if rollout.state != "paused":
                await self._save(rollout, "running")
            if rollout.state != "paused":  # nor while that was written
                core.events.add(rollout.topic, "running")
            run, split = body.run or rollout.id, splits[body.split]
            done = await self._go_on(rollout, run)
            gate = asyncio.Semaphore(AHEAD)
            async with asyncio.TaskGroup() as group:
                for index in _indices(body, split):
                    id = f"{rollout.id}/{body.split}/{index}"
                    if id in done:
                        continue
                    await gate.acquire()
                    row = await core.media_threads.call(split.row, index, limit=DATABASE_LIMIT)
                    task = self._task(id, index, row, body)
                    group.create_task(self._group(rollout, context, task, run, gate))
            await self._end(rollout, "completed", None)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            what = str(cause) if isinstance(cause, RelaxError) else f"{type(cause).__name__}: {cause}"
            await self._end(rollout, "failed", what)

    async def _go_on(self, rollout: Rollout, run: str) -> set[str]:
        """Groups that an earlier start made durable, or found unusable; those that it did not live to tell of are told now."""
        durable = await self.core.ask(self._durable, rollout.id, run)
        told: set[str] = set()
        seq = 0
        while events := await self.core.events.after(rollout.topic, seq):
            told |= {event.data["id"] for event in events if event.kind == "group"}
            seq = events[-1].seq
        done, counts = told | set(durable), rollout.counts
        counts["done"], counts["unusable"] = len(done), len(done - set(durable))
        counts["trajectories"] = sum(len(rows) for _, rows in durable.values())
        for id, (task_index, rows) in durable.items():
            if id not in told:
                self.core.events.add(rollout.topic, "group", id=id, task_index=task_index, error=None, trajectories=rows)
        return done

    def _task(self, id: str, index: int, row: dict[str, Any], body: RolloutBody) -> GroupTask:
        sampling = body.sampling.over(self.core.config.sampling)
        return GroupTask(id, body.split, index, row, body.group_size, body.seed, sampling, body.on_failure, body.max_retries)

    async def _group(
        self, rollout: Rollout, context: RolloutContext, task: GroupTask, run: str, gate: asyncio.Semaphore
    ) -> None:
        try:
            result = await play_group(context, task)
            for trajectory in result.trajectories:
                self.core.metrics.finished.labels(trajectory.status).inc()
            if result.group is not None:
                await self.core.commit(result.group, run, task.split, rollout.key)
            self._tell(rollout, task, result)
        finally:
            gate.release()

    def _tell(self, rollout: Rollout, task: GroupTask, result: GroupResult) -> None:
        """After the commit, so that what is told is durable."""
        counts = rollout.counts
        counts["done"] += 1
        if result.group is None:
            counts["unusable"] += 1
            error = result.error or "no response tokens"
            self.core.events.add(rollout.topic, "group", id=task.id, task_index=task.task_index, error=error, trajectories=[])
            return
        rows = [
            {"id": t.id, "status": t.status, "reward": t.reward, "rewards": t.rewards, "n_tokens": t.n_response_tokens}
            for t in result.group.trajectories
        ]
        counts["trajectories"] += len(rows)
        self.core.events.add(rollout.topic, "group", id=task.id, task_index=task.task_index, error=None, trajectories=rows)

    # ------------------------------------------------------------------------------------------------------ database

    def _insert(self, row: dict[str, Any]) -> tuple[Rollout, bool]:
        try:
            with self.core.journal.writing("submit a rollout") as connection:
                connection.execute(insert(rollouts).values(row))
            return _rollout(row), True
        except JournalError as error:
            if not isinstance(error.__cause__, IntegrityError) or row["idempotency_key"] is None:
                raise
        with self.core.journal.reading("find a rollout by its idempotency key") as connection:
            query = select(rollouts).where(rollouts.c.key == row["key"], rollouts.c.idempotency_key == row["idempotency_key"])
            return _rollout(connection.execute(query).mappings().one()), False

    def _durable(self, id: str, run: str) -> dict[str, tuple[int, list[dict[str, Any]]]]:
        """Task index and trajectories, as told in events, of the groups in the journal."""
        t = trajectories.c
        query = select(t.group_id, t.task_index, t.id, t.status, t.reward, t.rewards, t.n_tokens).order_by(t.seq)
        query = query.where(t.run == run, t.group_id.startswith(f"{id}/", autoescape=True))
        found: dict[str, tuple[int, list[dict[str, Any]]]] = {}
        with self.core.journal.reading(f"find the groups of rollout {id}") as connection:
            for row in connection.execute(query).mappings():
                rows = found.setdefault(row["group_id"], (row["task_index"], []))[1]
                rows.append({name: row[name] for name in ("id", "status", "reward", "rewards", "n_tokens")})
        return found

    async def _save(self, rollout: Rollout, state: str) -> None:
        rollout.state = state
        values = dict(state=state, counts=rollout.counts, error=rollout.error, ended_at=rollout.ended_at)

        def write() -> None:
            with self.core.journal.writing(f"note the state of rollout {rollout.id}") as connection:
                connection.execute(update(rollouts).where(rollouts.c.id == rollout.id).values(values))

        await self.core.ask(write)

    async def _end(self, rollout: Rollout, state: str, error: str | None) -> None:
        with contextlib.suppress(JournalError):  # who sees that it is over must find all its groups told
            await self.core.events.flush()
        rollout.error, rollout.ended_at = error, time.time()
        await self._save(rollout, state)
        self.core.events.add(rollout.topic, "finished", state=state, counts=rollout.counts, error=error)


def _indices(body: RolloutBody, split: TaskSplit) -> list[int]:
    """The tasks to play, in order.

    Raises:
        ConfigError: both were named, or a task that does not exist.
    """
    if body.tasks is not None:
        if len(set(body.tasks)) != len(body.tasks):
            raise ConfigError("tasks: each may be named once; for more episodes of one raise group_size")
        return body.tasks
    n = body.n if body.n is not None else len(split) if split.finite else None
    if n is None:
        raise ConfigError("the tasks are a generator: say how many with n, or name them with tasks")
    return list(range(n))


def _rollout(row: Any) -> Rollout:
    names = ("id", "key", "request", "state", "counts", "created_at")
    return Rollout(**{name: row[name] for name in names}, error=row.get("error"), ended_at=row.get("ended_at"))
