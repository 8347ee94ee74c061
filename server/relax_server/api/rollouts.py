"""Rollouts: groups of episodes that the service plays by itself, and tells of as they finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from relax_sdk.errors import ClaimLost, ConfigError, JournalError, RelaxError, UnstorableError
from relax_sdk.retrying import growing_pauses
from relax_sdk.tasks import KeptRows
from relax_sdk.trajectory import derive_seed
from relax_server.api.core import DATABASE_LIMIT, ServiceCore
from relax_server.api.holding import Holding, keep
from relax_server.api.keys import LOCAL, Key
from relax_server.api.logs import FIELDS
from relax_server.api.pausing import Gate
from relax_server.api.rollout_store import ACTIVE, Rollout, RolloutStore
from relax_server.api.schemas import RolloutBody
from relax_server.api.starts import GroupStarts
from relax_server.gateway.errors import ApiError, bad, unknown
from relax_server.log_ids import add_ids
from relax_server.rollout.context import RolloutContext
from relax_server.rollout.group import GroupResult, GroupTask, play_group

HOST_SECONDS = 60.0
"""Seconds for the host of an environment to come back after the service was started again."""
logger = logging.getLogger(__name__)

AHEAD = 64
"""Groups of one rollout that are begun at once, if their key may have so many episodes; see `GroupStarts`."""
CANCEL_SECONDS = 1.0
"""Seconds in which the episodes of a rollout that is cancelled may end before its owner is answered."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds before a group that could not be written is tried again: the first, and the longest."""


class RolloutHub:
    """The rollouts that this server plays; those that a crash interrupted go on where the journal ends, also another service's.

    Args:
        core: of the service.
    """

    def __init__(self, core: ServiceCore) -> None:
        self.core = core
        self.store = RolloutStore(core.journal, Holding("rollout", core.holder), core.config.model)
        self._playing: dict[str, tuple[Rollout, asyncio.Task[None]]] = {}
        self._gates: dict[str, Gate] = {}
        self._starts = GroupStarts(core.slots.total)
        self._switching = asyncio.Lock()
        """Held while states are compared with those in the database."""
        self._keeping: asyncio.Task[None] | None = None

    @property
    def playing(self) -> int:
        """Rollouts under way."""
        return len(self._playing)

    @property
    def topics(self) -> list[str]:
        """Topics of the events of rollouts under way."""
        return [rollout.topic for rollout, _ in self._playing.values()]

    async def submit(self, body: RolloutBody, key: Key, idempotency_key: str | None) -> tuple[Rollout, bool]:
        """Begin a rollout; the same idempotency key gives the same rollout.

        Returns:
            It, and whether it is new.

        Raises:
            ApiError: unknown environment or tasks, no tokens, too many rollouts, or the idempotency key is used.
            ConfigError: settings outside their range.
        """
        core = self.core
        if core.draining:
            raise ApiError(503, "the service is shutting down; go to another one", "draining", headers={"Retry-After": "5"})
        core.rates.check(key)
        spec = await core.envs.find(body.env)
        splits = await core.splits(spec)
        if body.split not in splits:
            raise bad(f"{spec.id} has no split {body.split!r}; there are {', '.join(splits)}", "split")
        self._context(body, key, core.gate)  # what cannot be played is refused now
        if body.run is not None:
            await core.own_run(body.run, key)
        request = body.model_dump(exclude_none=True)
        indices = _indices(body, splits[body.split])
        row: dict[str, Any] = dict(id=f"r_{secrets.token_hex(8)}", key=key.id, idempotency_key=idempotency_key)
        counts = {"groups": len(indices), "done": 0, "unusable": 0, "trajectories": 0}
        row |= dict(request=request, state="queued", counts=counts, created_at=time.time())
        rollout, new = await core.ask(self.store.insert, row, core.config.max_rollouts)
        if not new and rollout.request != request:
            message = f"Idempotency-Key {idempotency_key!r} was used for another request, rollout {rollout.id}"
            raise ApiError(409, message, "idempotency_conflict", "Idempotency-Key")
        if new:
            core.events.add(rollout.topic, "queued", groups=len(indices))
            self._begin(rollout, key)
        return rollout, new

    async def resume(self) -> None:
        """Go on with what was under way when this service ended, and from now on with what other services leave."""
        await self._take()
        self._keeping = asyncio.get_running_loop().create_task(keep(self._turn, "rollouts"))

    async def get(self, id: str, key: Key) -> Rollout:
        """A rollout of this key, or any for an admin.

        Raises:
            ApiError: there is none.
        """
        playing = self._playing.get(id)
        rollout = playing[0] if playing is not None else await self.core.ask(self.store.find, id)
        if rollout is None or (rollout.key != key.id and not key.may("admin")):
            raise unknown("rollout", id)
        return rollout

    async def list(self, key: Key, limit: int) -> list[Rollout]:
        """The rollouts of a key, newest first; all for an admin."""
        found = await self.core.ask(self.store.newest, None if key.may("admin") else key.id, limit)
        return [self._playing[rollout.id][0] if rollout.id in self._playing else rollout for rollout in found]

    async def cancel(self, rollout: Rollout, why: str | None = None) -> Rollout:
        """End it; generation in flight is aborted, groups that are durable stay.

        Args:
            rollout: to end.
            why: kept as its error; None: its owner wished it.
        """
        playing = self._playing.get(rollout.id)
        if playing is None and rollout.active:
            rollout = await self._elsewhere(rollout, "cancelled")
            if rollout.state == "cancelled":
                self.core.events.add(rollout.topic, "finished", state=rollout.state, counts=rollout.counts, error=None)
        elif playing is not None:
            rollout, task = playing
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
            if rollout.active:
                await self._end(rollout, "cancelled", why)
        return rollout

    async def _cancel_with_its_key(self, rollout: Rollout, why: str) -> None:
        try:
            await self.cancel(rollout, why)
        except RelaxError as error:  # it is not gone on with, as its key does not work
            logger.warning("a rollout's end was not noted: %s", error, extra={FIELDS: {"rollout": rollout.id}})

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
        async with self._switching:
            gate, playing = self._gates.get(rollout.id), self._playing.get(rollout.id)
            rollout = playing[0] if playing is not None else rollout
            was = rollout.state
            if rollout.active and (was == "paused") != (state == "paused"):
                if gate is None:
                    rollout = await self._elsewhere(rollout, state)
                else:
                    self._hold(rollout, state == "paused")
                    await self._save(rollout, state)
            if not rollout.active:
                raise ApiError(409, f"rollout {rollout.id} is over ({rollout.state})", "rollout_over")
            if rollout.state != was:
                self.core.events.add(rollout.topic, kind, by="rollout")
            return rollout

    async def _elsewhere(self, rollout: Rollout, state: str) -> Rollout:
        """Switch one that another server plays, or none at the moment; that one sees it with its next beat."""
        return await self.core.ask(self.store.switch, rollout.id, state)

    async def close(self) -> None:
        """Stop playing; what was under way goes on when the service is started again, or at another server."""
        if self._keeping is not None:
            self._keeping.cancel()
        tasks = [task for _, task in self._playing.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=DATABASE_LIMIT)
        with contextlib.suppress(RelaxError):  # else it is free when it was not renewed for long enough
            await self.core.ask(self.store.release)

    # ------------------------------------------------------------------------------------------------- who plays what

    async def _turn(self) -> None:
        await self._renew()
        if not self.core.draining:
            await self._take()

    async def _take(self) -> None:
        """Play what is free. An environment that this service does not know is left to others."""
        core = self.core
        free = [found for found in await core.ask(self.store.free) if found[0] not in self._playing]
        known = {env for env in {env for _, env, _ in free} if await core.envs.knows(env)}
        ids = [id for id, env, own in free if own or env in known]
        if not ids:
            return

        def take() -> list[tuple[Rollout, Key | None]]:
            return [(rollout, core.keys.by_id(rollout.key)) for rollout in self.store.take(ids)]

        for rollout, key in await core.ask(take):
            logger.info("going on with a rollout", extra={FIELDS: {"rollout": rollout.id}})
            if key is None:
                await self._end(rollout, "cancelled", "its key was revoked or has expired")
            else:
                self._begin(rollout, key)

    async def _renew(self) -> None:
        """Hold on to what is played here; what was switched elsewhere follows, and what was lost is stopped."""
        async with self._switching:
            playing = [rollout for rollout, _ in self._playing.values() if rollout.active]
            states = await self.core.ask(self.store.renew, playing) if playing else {}
            for rollout in playing:
                found = self._playing.get(rollout.id)
                if found is None or not rollout.active:
                    continue  # it ended meanwhile
                state = states.get(rollout.id)
                if state not in ACTIVE:
                    level, how = (logging.INFO, state) if state else (logging.WARNING, "taken by another service")
                    logger.log(level, "a rollout was %s", how, extra={FIELDS: {"rollout": rollout.id}})
                    found[1].cancel()
                elif (state == "paused") != (rollout.state == "paused"):
                    self._hold(rollout, state == "paused")
                    rollout.state = state

    # ------------------------------------------------------------------------------------------------------- playing

    def _begin(self, rollout: Rollout, key: Key) -> None:
        self._gates[rollout.id] = Gate(self.core.gate)
        self._hold(rollout, rollout.state == "paused")
        task = asyncio.get_running_loop().create_task(self._play(rollout, key))
        self._playing[rollout.id] = rollout, task
        if key is not LOCAL:
            over = self.core.watch.use(key.id, lambda why: self.core.spawn(self._cancel_with_its_key(rollout, why)))
            task.add_done_callback(lambda _: over())
        task.add_done_callback(lambda _: self._forget(rollout))

    def _forget(self, rollout: Rollout) -> None:
        self._playing.pop(rollout.id, None)
        self._gates.pop(rollout.id, None)
        self._starts.forget(rollout)

    def _hold(self, rollout: Rollout, paused: bool) -> None:
        """Begin no episode of it, or go on."""
        gate = self._gates[rollout.id]
        if paused:
            gate.clear()
            self._starts.pause(rollout)
        else:
            gate.set()
            self._starts.unpause(rollout)

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
            splits = await core.splits(await core.envs.expect(body.env, HOST_SECONDS))
            context = self._context(body, key, self._gates[rollout.id])
            if rollout.state != "paused" and not await self._save(rollout, "running"):
                return
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
                    await core.envs.require_time(body.env, patient=True)
                    await self._starts.begin(rollout, key, task.size)
                    played = group.create_task(self._group(rollout, context, task, run, gate))
                    played.add_done_callback(lambda _: self._starts.end(rollout, body.group_size))
            await self._end(rollout, "completed", None)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            if isinstance(cause, ClaimLost):
                logger.warning("the rollout stops here: %s", cause)
                return
            if isinstance(cause, JournalError) and not isinstance(cause, UnstorableError):
                logger.warning("the rollout stops until the journal can be read and written again: %s", cause)
                return  # nobody holds it any more, so that this server or another one takes it up where the journal ends
            what = str(cause) if isinstance(cause, RelaxError) else f"{type(cause).__name__}: {cause}"
            await self._end(rollout, "failed", what)

    async def _go_on(self, rollout: Rollout, run: str) -> set[str]:
        """Groups that an earlier start made durable, or found unusable; those that it did not live to tell of are told now."""
        durable = await self.core.ask(self.store.durable, rollout.id, run)
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
                self._tell_group(rollout, id, task_index, None, rows)
        return done

    def _task(self, id: str, index: int, row: dict[str, Any], body: RolloutBody) -> GroupTask:
        sampling = body.sampling.over(self.core.config.sampling)
        seed = derive_seed(id.partition("/")[0]) if body.seed is None else body.seed
        return GroupTask(id, body.split, index, row, body.group_size, seed, sampling, body.on_failure, body.max_retries)

    async def _group(
        self, rollout: Rollout, context: RolloutContext, task: GroupTask, run: str, gate: asyncio.Semaphore
    ) -> None:
        try:
            result = await play_group(context, task)
            for trajectory in result.trajectories:
                self.core.metrics.finished.labels(trajectory.status).inc()
            new = await self._commit(rollout, task, result, run)
            self._tell(rollout, task, result, new)
        finally:
            gate.release()

    async def _commit(self, rollout: Rollout, task: GroupTask, result: GroupResult, run: str) -> bool:
        """Make a group durable, tried until it is; one that cannot be stored becomes unusable.

        Returns:
            False when it was there before the first try.
        """
        tried = False
        for pause in growing_pauses(FIRST_PAUSE, LONGEST_PAUSE):
            if result.group is None:
                break
            try:
                held = self.store.holding.held(rollout.id)
                return await self.core.commit(result.group, run, task.split, rollout.key, held) or tried
            except UnstorableError as error:
                result.group, result.error = None, str(error)
            except ClaimLost:
                raise
            except JournalError as error:
                logger.warning("group %s is not durable yet and is kept: %s", task.id, error)
                await asyncio.sleep(pause)
                tried = True  # it may be there all the same
        return True

    def _tell(self, rollout: Rollout, task: GroupTask, result: GroupResult, new: bool) -> None:
        """Tell of a group that is durable; one that is not new was told by the server that committed it."""
        counts = rollout.counts
        counts["done"] += 1
        if result.group is None:
            counts["unusable"] += 1
            self._tell_group(rollout, task.id, task.task_index, result.error or "no response tokens", [])
            return
        rows = [
            {"id": t.id, "status": t.status, "reward": t.reward, "rewards": t.rewards, "n_tokens": t.n_response_tokens}
            for t in result.group.trajectories
        ]
        counts["trajectories"] += len(rows)
        if new:
            self._tell_group(rollout, task.id, task.task_index, None, rows)

    def _tell_group(self, rollout: Rollout, id: str, task_index: int, error: str | None, rows: list[dict[str, Any]]) -> None:
        told = {"id": id, "task_index": task_index, "error": error, "trajectories": rows}
        self.core.events.add_held(self.store.holding.held(rollout.id), rollout.topic, "group", **told)

    async def _save(self, rollout: Rollout, state: str) -> bool:
        """Give it a state; False: it is over already, or another server has it."""
        rollout.state = state
        return await self.core.ask(self.store.save, rollout)

    async def _end(self, rollout: Rollout, state: str, error: str | None) -> None:
        with contextlib.suppress(JournalError):  # who sees that it is over must find all its groups told
            await self.core.events.flush()
        rollout.error, rollout.ended_at = error, time.time()
        if await self._save(rollout, state):
            self.core.events.add(rollout.topic, "finished", state=state, counts=rollout.counts, error=error)


def _indices(body: RolloutBody, split: KeptRows) -> Sequence[int]:
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
    return range(n)
