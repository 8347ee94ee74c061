"""`Episode`: one task played once, through its states, within its time limit, to a `Trajectory` whatever happens."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from relax_sdk.errors import EngineAborted, EpisodeError, EpisodeOver, EpisodeTimeout, RelaxError, RewardError
from relax_sdk.rewards import score, scores_groups
from relax_sdk.storable import storable_text
from relax_sdk.trajectory import Status, Trajectory
from relax_sdk.validation import plain_data
from relax_server.log_ids import add_ids
from relax_server.rollout.context import RolloutContext
from relax_server.rollout.environment import named_error
from relax_server.rollout.session import EpisodeSession, State
from relax_server.rollout.task import EpisodeTask

logger = logging.getLogger(__name__)

GRACE = 5.0
"""Seconds after its time limit in which an episode must have ended; then it is left behind."""

FAILURES = frozenset({Status.FAILED, Status.TIMED_OUT})
USABLE = frozenset({Status.COMPLETED, Status.TRUNCATED})


class Episode:
    """Plays one task once.

    `launch` starts it; `result` always gets a trajectory, also when the episode failed, was cancelled, or hangs in code that
    ignores its cancellation. States: `queued` → `resetting` → `running` → `scoring` → a `Status`.

    Args:
        context: shared by all episodes of the worker.
        task: what to play.
    """

    def __init__(self, context: RolloutContext, task: EpisodeTask) -> None:
        self.context = context
        self.task = task
        self.state: State | Status = State.QUEUED
        self.session = EpisodeSession(context, task, self._enter)
        self.result: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        self.error: RelaxError | None = None
        self._task: asyncio.Task[None] | None = None
        self._created = time.monotonic()
        self._started: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False
        """The episode's time limit has passed, and it was cancelled for that."""
        self._cancelled = ""
        """Why it was cancelled."""
        self._holds_slot = False
        self._queued: Callable[[], None] | None = None
        """Called when it waits for a place no longer."""
        context.tally.states[self.state] += 1

    def launch(self, queued: Callable[[], None] | None = None) -> asyncio.Future[Trajectory]:
        """Start it, and return `result`.

        Args:
            queued: called once, when it waits for a place no longer: it has one, or it is over.
        """
        self._queued = queued
        self._task = asyncio.get_running_loop().create_task(self._run())
        self.context.tasks.add(self._task)
        self._task.add_done_callback(self._ended)
        return self.result

    def cancel(self, why: str = "cancelled") -> None:
        """Stop it; its generation in flight is aborted and `result` gets a trajectory with status `cancelled`, and `why`."""
        self._cancelled = self._cancelled or why
        if self._task is not None:
            self._task.cancel()

    @property
    def has_group_rewards(self) -> bool:
        """Whether the rubric will score the whole group; then the environment stays open until `close`."""
        return self.context.scored and scores_groups(self.session.env)

    async def close(self) -> None:
        """Close an environment that was left open for group rewards."""
        await self.session.close()

    # ------------------------------------------------------------------------------------------------------- playing

    async def _run(self) -> None:
        add_ids(trajectory=self.task.id)
        try:
            await self.context.slots.acquire()
            self._holds_slot = True
            self._leave_queue()
            self._started = time.monotonic()
            self.session.trace.begin()
            self._timer = asyncio.get_running_loop().call_later(self.context.config.episode_timeout, self._late)
            trajectory = await self._play()
            if self._expired:  # and its cancellation was swallowed on the way
                raise self._timed_out()
        except asyncio.CancelledError:
            if not self._expired or self._cancelled:
                self._finish(self._trajectory(Status.CANCELLED, self._stopped()))
                raise
            self._finish(self._trajectory(Status.TIMED_OUT, self._timed_out()))
        except EpisodeTimeout as error:
            self._finish(self._trajectory(Status.TIMED_OUT, error))
        except EngineAborted as error:
            self._finish(self._trajectory(Status.CANCELLED, error))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:
            named = error if isinstance(error, RelaxError) else named_error(self.session.where("agent"), error, EpisodeError)
            self._finish(self._trajectory(Status.FAILED, named))
        else:
            self._finish(trajectory)
        finally:
            if self.state not in USABLE or not self.has_group_rewards:
                await self.session.close()

    async def _play(self) -> Trajectory:
        session = self.session
        try:
            await self.context.agent(session)
        except EpisodeOver:
            if session.limit_reached is None:
                raise
        if session.failure is not None:
            raise session.failure
        if not session.turns:
            raise EpisodeError(f"{session.where('agent')}: the agent returned without asking the policy")
        finished = session.outcome is not None and session.outcome.terminated and not session.outcome.truncated
        trajectory = self._trajectory(Status.COMPLETED if finished else Status.TRUNCATED, None)
        if self.context.scored:
            self._enter(State.SCORING)
            await self._score(trajectory)
        return trajectory

    async def _score(self, trajectory: Trajectory) -> None:
        started, limit, excluded = time.monotonic(), self.context.config.score_timeout, self.session.excluded

        async def invoke(function: Callable[..., Any], *arguments: Any) -> Any:
            spent = time.monotonic() - started - (self.session.excluded - excluded)
            return await self.session.runner.invoke(function, *arguments, limit=max(limit - spent, 1e-3))

        try:
            with self.session.trace.stage("score"):
                await score(self.session.env, trajectory, invoke)
        except EpisodeTimeout as error:
            raise EpisodeTimeout(f"{self.session.where('score')}: took longer than {limit:g} s") from error
        except RelaxError as error:
            raise named_error(self.session.where("score"), error) from error
        finally:
            trajectory.timings["score"] = time.monotonic() - started
        trajectory.rewards |= self.session.extra_rewards
        trajectory.reward += sum(self.session.extra_rewards.values())
        if not math.isfinite(trajectory.reward):
            raise RewardError(f"{self.session.where('score')}: the rewards add up to {trajectory.reward}")
        trajectory.timings["total"] = time.monotonic() - (self._started or started)

    # -------------------------------------------------------------------------------------------------------- ending

    def _trajectory(self, status: Status, error: RelaxError | None, bare: bool = False) -> Trajectory:
        """What is kept of the episode; without messages and info if `bare`."""
        session, task, now = self.session, self.task, time.monotonic()
        self.error, outcome = error, session.outcome
        started = self._started if self._started is not None else now
        failure = {} if error is None else {"failure": type(error).__name__}
        return Trajectory(
            id=task.id,
            env=self.context.spec.id,
            env_version=self.context.env_class.version,
            task_index=task.task_index,
            group_id=task.group_id,
            group_index=task.group_index,
            group_size=task.group_size,
            seed=task.seed,
            status=status,
            turns=list(session.turns),
            messages=[] if bare else [message.to_openai() for message in session.messages],
            error=storable_text(str(error)) if error is not None else None,
            attempts=task.attempt,
            timings={"queued": started - self._created, **session.timings, "total": now - started},
            info=failure if bare else (plain_data(outcome.info) if outcome is not None else {}) | session.extra_info | failure,
        )

    def _finish(self, trajectory: Trajectory) -> None:
        if self.result.done():
            return
        self._enter(trajectory.status)
        self.session.trace.end(trajectory)
        if self.error is not None and (trajectory.status in FAILURES or isinstance(self.error, EngineAborted)):
            self.context.tally.fail(self.error)
            logger.info("episode %s, attempt %d: %s", trajectory.status, self.task.attempt, self.error)
        self.result.set_result(trajectory)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """The task is over; if it never ran, or died in a way of its own, the result is still owed."""
        self.context.tasks.discard(task)
        self._leave_queue()
        if self._timer is not None:
            self._timer.cancel()
        self._release()
        if self.result.done():
            return
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._finish(self._trajectory(Status.CANCELLED, self._stopped()))
        else:  # what was said, or the info, cannot be put down
            named = named_error(self.session.where("episode"), error, EpisodeError)
            self._finish(self._trajectory(Status.FAILED, named, bare=True))

    def _late(self) -> None:
        """The time limit may have passed: end the episode, and if it does not heed that, leave it behind."""
        assert self._started is not None and self._task is not None
        limit = self.context.config.episode_timeout + (GRACE if self._expired else 0.0)
        left = self._started + self.session.excluded + limit - time.monotonic()
        if left <= 0 and not self._expired:
            self._expired, left = True, GRACE
            self._task.cancel()
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._late)
            return
        self.context.tally.ignored_cancel += 1
        self.session.runner.lost = True
        error = EpisodeTimeout(f"{self.session.where('episode')}: ignored its cancellation and was left behind")
        self._finish(self._trajectory(Status.TIMED_OUT, error))
        self._release()

    def _stopped(self) -> EpisodeError:
        return EpisodeError(f"{self.session.where('episode')}: {self._cancelled or 'cancelled'}")

    def _timed_out(self) -> EpisodeTimeout:
        limit = self.context.config.episode_timeout
        return EpisodeTimeout(f"{self.session.where('episode')}: took longer than {limit:g} s")

    def _leave_queue(self) -> None:
        queued, self._queued = self._queued, None
        if queued is not None:
            queued()

    def _release(self) -> None:
        if self._holds_slot:
            self._holds_slot = False
            self.context.slots.release()

    def _enter(self, state: State | Status) -> None:
        if self.result.done():
            return
        states = self.context.tally.states
        if isinstance(self.state, State):
            states[self.state] -= 1
        states[state] += 1
        self.state = state
