"""A rollout while it is played: its groups are begun as places are free, made durable and told of, until it is over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from relax_sdk.errors import ClaimLost, ConfigError, JournalError, RelaxError, RunError, UnstorableError
from relax_sdk.retrying import growing_pauses
from relax_sdk.tasks import KeptRows
from relax_sdk.trajectory import Group, derive_seed
from relax_server.api.core import DATABASE_LIMIT, ServiceCore
from relax_server.api.keys import Key
from relax_server.api.pausing import Gate
from relax_server.api.rollout_store import Rollout, RolloutStore
from relax_server.api.schemas import RolloutBody
from relax_server.api.starts import GroupStarts
from relax_server.log_ids import add_ids
from relax_server.rollout.context import RolloutContext
from relax_server.rollout.failed_attempts import FAILED, KEPT, FailedAttempts, Failures
from relax_server.rollout.group import GroupResult, GroupTask, play_group

HOST_SECONDS = 60.0
"""Seconds for the host of an environment to come back after the service was started again."""
AHEAD = 64
"""Groups of one rollout that are begun at once, if their key may have so many episodes; see `GroupStarts`."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds before a group that could not be written is tried again: the first, and the longest."""

logger = logging.getLogger(__name__)


class RolloutPlayer:
    """Plays rollouts that this service holds.

    Args:
        core: of the service.
        store: of its rollouts.
        starts: lets groups begin when their key has places.
    """

    def __init__(self, core: ServiceCore, store: RolloutStore, starts: GroupStarts) -> None:
        self.core, self.store, self._starts = core, store, starts

    def context(self, body: RolloutBody, key: Key, gate: Gate) -> RolloutContext:
        """What its episodes are played in.

        Raises:
            ConfigError: settings outside their range.
        """
        config = self.core.rollout_config(
            body.limits.model_dump(exclude_none=True)
            | {"group_size": body.group_size, "on_failure": body.on_failure, "max_retries": body.max_retries}
        )
        return self.core.context(body.run or "rollouts", self.core.spec(body.env), config, key, gate=gate)

    async def play(self, rollout: Rollout, key: Key, gate: Gate) -> None:
        """Play all that is not durable yet, and note how it ended; the gate is closed while it is paused."""
        core = self.core
        add_ids(rollout=rollout.id, key=key.id)
        try:
            body = RolloutBody.model_validate(rollout.request)
            splits = await core.splits(await core.envs.expect(body.env, HOST_SECONDS))
            context = self.context(body, key, gate)
            if rollout.state != "paused" and not await self.save(rollout, "running"):
                return
            if rollout.state != "paused":  # nor while that was written
                core.events.add(rollout.topic, "running")
            run, split = body.run or rollout.id, splits[body.split]
            failures = self._failures(rollout, run, context)
            done = await self._go_on(rollout, run)
            ahead = asyncio.Semaphore(AHEAD)
            async with asyncio.TaskGroup() as group:
                for index in indices(body, split):
                    id = f"{rollout.id}/{body.split}/{index}"
                    if id in done:
                        continue
                    await ahead.acquire()
                    row = await core.media_threads.call(split.row, index, limit=DATABASE_LIMIT)
                    task = self._task(id, index, row, body)
                    await core.envs.require_time(body.env, patient=True)
                    await self._starts.begin(rollout, key, task.size)
                    played = group.create_task(self._group(rollout, context, task, run, failures, ahead))
                    played.add_done_callback(lambda _: self._starts.end(rollout, body.group_size))
            await self.end(rollout, "completed", None)
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
            await self.end(rollout, "failed", what)

    async def _go_on(self, rollout: Rollout, run: str) -> set[str]:
        """Groups that an earlier start made durable, or found unusable; those that it did not live to tell of are told now."""
        durable = await self.core.ask(self.store.durable, rollout.id, run)
        told: set[str] = set()
        seq = failed = 0
        while events := await self.core.events.after(rollout.topic, seq):
            groups = [event.data for event in events if event.kind == "group"]
            told |= {group["id"] for group in groups}
            failed += sum(sum(group.get("failures", {}).values()) for group in groups)
            seq = events[-1].seq
        done, counts = told | set(durable), rollout.counts
        counts["done"], counts["unusable"], counts["failed"] = len(done), len(done - set(durable)), failed
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
        self,
        rollout: Rollout,
        context: RolloutContext,
        task: GroupTask,
        run: str,
        failures: Failures,
        ahead: asyncio.Semaphore,
    ) -> None:
        """Play a group, and make it durable and told, whatever the next line says of the rollout as a whole.

        Raises:
            RunError: too much of the rollout has failed.
        """
        try:
            result = await play_group(context, task)
            for trajectory in result.trajectories:
                self.core.metrics.finished.labels(trajectory.status).inc()
            new = await self._commit(rollout, task, result, run)
            why = await failures.ended(context.spec.id, result, result.group)
            self._tell(rollout, task, result, new)
            if why is not None:
                raise RunError(f"{why}. Mend the environment and submit the rest again")
        finally:
            ahead.release()

    def _failures(self, rollout: Rollout, run: str, context: RolloutContext) -> Failures:
        """What is done about failed attempts: as in a training run."""
        core = self.core

        async def commit(group: Group) -> bool:
            return await core.commit(group, run, FAILED, rollout.key, self.store.holding.held(rollout.id))

        async def known() -> int:
            return await core.ask(core.journal.count, run, KEPT)

        failures = Failures(context.config, FailedAttempts(commit, known, context.config.keep_failed))
        failures.limits.any_usable = rollout.counts["trajectories"] > 0
        return failures

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
        counts["failed"] += result.failures.total()
        if result.group is None:
            counts["unusable"] += 1
            self._tell_group(rollout, task.id, task.task_index, result.error or "no response tokens", [], result.failures)
            return
        rows = [
            {"id": t.id, "status": t.status, "reward": t.reward, "rewards": t.rewards, "n_tokens": t.n_response_tokens}
            for t in result.group.trajectories
        ]
        counts["trajectories"] += len(rows)
        if new:
            self._tell_group(rollout, task.id, task.task_index, None, rows, result.failures)

    def _tell_group(
        self,
        rollout: Rollout,
        id: str,
        task_index: int,
        error: str | None,
        rows: list[dict[str, Any]],
        failures: Mapping[str, int] | None = None,
    ) -> None:
        """Tell of a group; `failures` are its failed attempts by cause, where they are known."""
        told = {"id": id, "task_index": task_index, "error": error, "trajectories": rows, "failures": dict(failures or {})}
        self.core.events.add_held(self.store.holding.held(rollout.id), rollout.topic, "group", **told)

    async def save(self, rollout: Rollout, state: str) -> bool:
        """Give it a state; False: it is over already, or another server has it."""
        rollout.state = state
        return await self.core.ask(self.store.save, rollout)

    async def end(self, rollout: Rollout, state: str, error: str | None) -> None:
        """Note how it ended, and tell of it; an error says why."""
        with contextlib.suppress(JournalError):  # who sees that it is over must find all its groups told
            await self.core.events.flush()
        rollout.error, rollout.ended_at = error, time.time()
        if await self.save(rollout, state):
            self.core.events.add(rollout.topic, "finished", state=state, counts=rollout.counts, error=error)


def indices(body: RolloutBody, split: KeptRows) -> Sequence[int]:
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
