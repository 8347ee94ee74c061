"""`ExternalSession`: an agent outside plays an episode over HTTP; all that its model calls sent and received is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from relax_sdk.config import SamplingParams
from relax_sdk.errors import RelaxError, UnstorableError
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.session import Session as AgentSession
from relax_sdk.session import StepOutcome
from relax_sdk.trajectory import Group, Status
from relax_server.api.core import ServiceCore
from relax_server.api.keys import Key
from relax_server.api.logs import FIELDS
from relax_server.api.outcomes import EndedSession, Keeping
from relax_server.api.quotas import AskedSlot
from relax_server.api.trajectories import finished
from relax_server.gateway.bodies import RewardBody
from relax_server.gateway.errors import ApiError, as_api_error
from relax_server.gateway.played import PlayedSession, over
from relax_server.rollout.calls import Answer, CallOptions
from relax_server.rollout.episode import USABLE, Episode
from relax_server.rollout.task import EpisodeTask

DONE_SECONDS = 60.0
"""Seconds without a call after which a session whose environment has ended is finished; until then rewards may come from
outside."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opening:
    """What a session is opened with."""

    env: str
    """`none`: the agent has a world of its own."""
    split: str
    task_index: int | None
    """None: with a seed of the caller's the one that follows from it, otherwise the next one of the split."""
    seed: int
    seeded: bool
    """The seed is the caller's."""
    run: str
    train: bool
    """Sampling is the session's own whatever the agent asks for, and the trajectory is served to trainers."""
    sampling: SamplingParams
    limits: dict[str, Any] = field(default_factory=dict)
    """Changes of the service's `RolloutConfig`."""
    sample_index: int = 0
    """Which of several episodes of the task; they differ in sampling only."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Kept with the trajectory."""


class ExternalSession(PlayedSession):
    """One episode of the service that is played from outside.

    Args:
        core: of the service.
        id: of the session.
        key: whose it is.
        opening: how it was opened.
        task: the episode.
        secret: the session's own key.
        remember: given what is to be kept of it once it is over and durable.
        place: that was asked for it.
    """

    def __init__(
        self,
        core: ServiceCore,
        id: str,
        key: Key,
        opening: Opening,
        task: EpisodeTask,
        secret: str,
        remember: Callable[[EndedSession], None],
        place: AskedSlot,
    ) -> None:
        self.core, self.key, self.opening = core, key, opening
        config = core.rollout_config(opening.limits)
        context = core.context(opening.run, core.spec(opening.env), config, key, self._play, slots=place)
        self.episode = Episode(context, task)
        super().__init__(id, secret, self.episode.session, opening.sampling, opening.train, core.work.of(key.id))
        self.owner = key.id
        self.opened_at = time.time()
        """Unix seconds."""
        self.observation: list[Message] = []
        """The first one."""
        self.tools: Sequence[dict[str, Any]] = ()
        """OpenAI schemas of the environment's tools."""
        self._ready: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()
        self._watch: asyncio.TimerHandle | None = None
        self.keeping = Keeping(self._keep, self.log_ids)
        """Makes the trajectory durable."""
        self._remember = remember
        if opening.metadata:
            self.session.extra_info["metadata"] = opening.metadata

    @property
    def topic(self) -> str:
        """Topic of the session's events."""
        return f"session/{self.id}"

    @property
    def log_ids(self) -> dict[str, str]:
        """What log lines about it carry."""
        return {"session": self.id, "trajectory": self.trajectory_id}

    @property
    def state(self) -> dict[str, Any]:
        """The session as clients are told of it."""
        episode = self.episode
        return {
            "id": self.id,
            "opened_at": self.opened_at,
            "env": episode.context.spec.id,
            "state": str(episode.state),
            "turns": len(self.session.turns),
            "calls": self.calls,
            "done": self.session.done,
            "trajectory_id": self.trajectory_id,
            "seed": episode.task.seed,
            "error": episode.result.result().error if self.over else None,
        }

    @property
    def over(self) -> bool:
        """Whether nothing more can be done in it."""
        return self.episode.result.done()

    # ------------------------------------------------------------------------------------------------------- playing

    async def start(self) -> list[Message]:
        """Begin the episode; returns the first observation.

        Raises:
            ApiError: the environment failed, or there was no place in time.
        """
        self.episode.launch().add_done_callback(lambda _: self._ended())
        self.core.events.add(self.topic, "opened", env=self.episode.context.spec.id, seed=self.episode.task.seed)
        self._look_for_idleness()
        done, _ = await asyncio.wait({self._ready, self.episode.result}, return_when=asyncio.FIRST_COMPLETED)
        if self._ready in done:
            return self._ready.result()
        error = self.episode.error
        if error is None or self.episode.state is Status.CANCELLED:
            raise ApiError(503, f"no session was opened: {error or 'cancelled'}", "cancelled", headers={"Retry-After": "1"})
        raise as_api_error(error)

    async def _play(self, session: AgentSession) -> None:
        """The agent, as the episode sees it."""
        self.observation = await session.reset()
        self.tools = session.tools
        self._ready.set_result(self.observation)
        await self.ended.wait()

    async def generate(self, messages: list[Message], options: CallOptions) -> Answer:
        """One model call, counted and told.

        Raises:
            ApiError: the session is over, or its key has used up its tokens.
            RelaxError: as `EpisodeSession.call`.
        """
        self.core.rates.check(self.key)
        metrics = self.core.metrics
        try:
            with metrics.seconds.time():
                answer = await super().generate(messages, options)
        except BaseException as error:
            metrics.calls.labels(type(error).__name__).inc()
            raise
        turn = answer.turn
        counts = {"prompt_tokens": len(turn.prompt_ids), "response_tokens": len(turn.response_ids)}
        metrics.calls.labels(turn.finish_reason).inc()
        metrics.tokens.labels("prompt").inc(counts["prompt_tokens"])
        metrics.tokens.labels("response").inc(counts["response_tokens"])
        self.core.events.add(self.topic, "turn", number=len(self.session.turns), finish_reason=turn.finish_reason, **counts)
        return answer

    async def step(self, action: AssistantMessage) -> StepOutcome:
        outcome = await super().step(action)
        ends = {"terminated": outcome.terminated, "truncated": outcome.truncated}
        self.core.events.add(self.topic, "step", reward=outcome.reward, **ends)
        return outcome

    def reward(self, body: RewardBody) -> dict[str, Any]:
        told = super().reward(body)
        self.core.events.add(self.topic, "reward", **told)
        return told

    async def finish(self) -> dict[str, Any]:
        """End the episode and wait until it is scored and durable; after an error it can be repeated until it is.

        Raises:
            ApiError: there was no model call yet.
            UnstorableError: the trajectory cannot be stored, however often it is tried.
            JournalError: it is not known to be durable; repeating this tries again.
        """
        if not self.over:
            self.end()
        return await (await self.keeping.outcome()).finish()

    def cancel(self, why: str = "cancelled") -> None:
        """End it without a reward; calls in flight are aborted, and told why."""
        if not self.over:
            self.interrupt(why)
        self.episode.cancel(why)

    def require_open(self) -> None:
        if self.over:
            trajectory = self.episode.result.result()
            raise over(self.id, trajectory.status + (f": {trajectory.error}" if trajectory.error else ""))
        if self.ended.is_set():
            raise over(self.id, "it is being scored")

    # --------------------------------------------------------------------------------------------------------- ending

    async def cancel_and_wait(self) -> None:
        """End it without a reward, and wait until that is durable, or is known not to be now."""
        self.cancel()
        with contextlib.suppress(RelaxError):
            await self.keeping.outcome()

    def _ended(self) -> None:
        """The episode is over."""
        if self._watch is not None:
            self._watch.cancel()
        self.core.metrics.finished.labels(self.episode.result.result().status).inc()
        self.keeping.begin()

    async def _keep(self) -> EndedSession:
        """Make the outcome durable, then tell of it; done again, it changes nothing.

        Raises:
            JournalError: it is not known to be durable.
        """
        trajectory, task, refused = self.episode.result.result(), self.episode.task, None
        group = Group(task.group_id, trajectory.env, task.task_index, [trajectory])
        split = "train" if self.opening.train and trajectory.status in USABLE else f"session-{self.opening.split}"
        outcome = finished(trajectory)
        try:
            await self.core.commit(group, self.opening.run, split, self.key.id)
        except UnstorableError as error:
            refused = error
            outcome |= {"error": f"the trajectory was not stored: {error}"}
            logger.error("the trajectory cannot be stored: %s", error, extra={FIELDS: self.log_ids})
        self.core.events.add(self.topic, "finished", **outcome)
        ended = EndedSession(self.id, self.secret, self.key, self.state, outcome, refused)
        self._remember(ended)
        return ended

    def _look_for_idleness(self) -> None:
        """Cancel it when nothing was asked for too long; one whose environment has ended is finished."""
        limit = self.core.config.idle_timeout
        done = self.session.done
        left = (min(limit, DONE_SECONDS) if done else limit) - (time.monotonic() - self.idle_since)
        if self.over:
            return
        if left <= 0 and not self.calls:
            self.ended.set() if done else self.cancel()
            return
        self._watch = asyncio.get_running_loop().call_later(min(max(left, 0.05), DONE_SECONDS), self._look_for_idleness)


AnySession: TypeAlias = ExternalSession | EndedSession


def still_open(session: AnySession) -> ExternalSession:
    """A session that somebody wants to go on with.

    Raises:
        ApiError: it is over and durable; the message says how it ended.
    """
    if isinstance(session, EndedSession):
        raise session.over()
    return session
