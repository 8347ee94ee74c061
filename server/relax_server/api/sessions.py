"""Sessions: an agent outside plays an episode over HTTP, and everything its model calls sent and received is recorded."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_sdk.config import SamplingParams
from relax_sdk.errors import RelaxError
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.session import Session as AgentSession
from relax_sdk.session import StepOutcome
from relax_sdk.trajectory import Group, Status, Trajectory, derive_seed
from relax_server.api.core import ServiceCore
from relax_server.api.keys import LOCAL, Key
from relax_server.api.next_task import NextTasks
from relax_server.api.trajectories import finished
from relax_server.gateway.bodies import RewardBody
from relax_server.gateway.digest import digest
from relax_server.gateway.errors import ApiError, as_api_error, bad, unknown
from relax_server.gateway.played import PlayedSession, over
from relax_server.log_ids import add_ids
from relax_server.rollout.calls import Answer, CallOptions
from relax_server.rollout.episode import USABLE, Episode
from relax_server.rollout.task import EpisodeTask

RUN = "sessions"
"""The journal's run that sessions belong to if they name none."""
DONE_SECONDS = 60.0
"""Seconds without a call after which a session whose environment has ended is finished; until then rewards may come from
outside."""
KEPT = 4096
"""Ended sessions whose outcome is remembered."""
UNKNOWN = ": it was not opened at this server, or that was killed or restarted since; open a new one"


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
    """

    def __init__(self, core: ServiceCore, id: str, key: Key, opening: Opening, task: EpisodeTask, secret: str) -> None:
        self.core, self.key, self.opening = core, key, opening
        context = core.context(opening.run, core.spec(opening.env), core.rollout_config(opening.limits), key, self._play)
        self.episode = Episode(context, task)
        super().__init__(id, secret, self.episode.session, opening.sampling, opening.train)
        self.observation: list[Message] = []
        """The first one."""
        self.tools: Sequence[dict[str, Any]] = ()
        """OpenAI schemas of the environment's tools."""
        self._ready: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()
        self._watch: asyncio.TimerHandle | None = None
        self.saved: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        """The trajectory, once it is durable."""
        self.saved.add_done_callback(_looked_at)
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
    def over(self) -> bool:
        """Whether nothing more can be done in it."""
        return self.episode.result.done()

    # ------------------------------------------------------------------------------------------------------- playing

    async def start(self) -> list[Message]:
        """Begin the episode; returns the first observation.

        Raises:
            ApiError: the environment failed, or there was no place in time.
        """
        self.episode.launch().add_done_callback(lambda result: self.core.spawn(self._save(result.result())))
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
        self.core.rates.take(self.key, counts["response_tokens"])
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
        """End the episode and wait until it is scored and durable."""
        if not self.over:
            self.end()
        return finished(await asyncio.shield(self.saved))

    def cancel(self, why: str = "cancelled") -> None:
        """End it without a reward; calls in flight are aborted, and told why."""
        if not self.over:
            self.interrupt(why)
        self.episode.cancel(why)

    def require_open(self) -> None:
        if self.over:
            trajectory = self.episode.result.result()
            raise over(self, trajectory.status + (f": {trajectory.error}" if trajectory.error else ""))
        if self.ended.is_set():
            raise over(self, "it is being scored")

    # --------------------------------------------------------------------------------------------------------- ending

    async def _save(self, trajectory: Trajectory) -> None:
        """Make the outcome durable, then tell of it."""
        if self._watch is not None:
            self._watch.cancel()
        self.core.metrics.finished.labels(trajectory.status).inc()
        task = self.episode.task
        group = Group(task.group_id, trajectory.env, task.task_index, [trajectory])
        split = "train" if self.opening.train and trajectory.status in USABLE else f"session-{self.opening.split}"
        try:
            await self.core.commit(group, self.opening.run, split, self.key.id)
        except RelaxError as error:
            self.saved.set_exception(as_api_error(error))
            return
        self.core.events.add(self.topic, "finished", **finished(trajectory))
        self.saved.set_result(trajectory)

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


class SessionHub:
    """All sessions of the service.

    Args:
        core: of the service.
    """

    def __init__(self, core: ServiceCore) -> None:
        self.core = core
        self._open: dict[str, ExternalSession] = {}
        """Open sessions, and those that ended last."""
        self._by_secret: dict[str, str] = {}
        self._tasks = NextTasks()
        self.ended_keys: dict[str, str] = {}
        """Keys that opened sessions and were revoked or have expired since, and which it was; the sessions' keys ended with
        them."""
        self._watched: set[str] = set()
        self._ended: deque[str] = deque()
        """Those whose outcome is remembered, the first to end first."""

    async def open(self, opening: Opening, key: Key) -> tuple[ExternalSession, str, list[Message]]:
        """Open a session.

        Returns:
            It, its own key, and the first observation.

        Raises:
            ApiError: unknown environment or task, no quota, or the environment failed.
        """
        core = self.core
        if core.draining:
            raise ApiError(503, "the service is shutting down; go to another one", "draining", headers={"Retry-After": "5"})
        if not core.gate.is_set():
            raise ApiError(503, "the service is paused; try again later", "paused", headers={"Retry-After": "5"})
        core.rates.check(key)
        if core.slots.running[key.id] >= key.episodes:
            message = f"key {key.name!r} has {key.episodes} episodes open already; finish some"
            raise ApiError(429, message, "episodes", headers={"Retry-After": "1"})
        spec = await core.envs.find(opening.env)
        splits = await core.splits(spec)
        if opening.split not in splits:
            raise bad(f"{spec.id} has no split {opening.split!r}; there are {', '.join(splits)}", "split")
        rows = splits[opening.split]
        seed = opening.seed if opening.seeded else None
        index = self._tasks.pick(rows, (key.id, spec.id, opening.split), opening.task_index, seed)
        row = rows.row(index) if rows.at_hand else await core.media_threads.call(rows.row, index, limit=60.0)
        id, secret = f"s_{secrets.token_hex(8)}", f"rls_{secrets.token_urlsafe(32)}"
        task = EpisodeTask(
            split=opening.split,
            task_index=index,
            row=row,
            group_id=f"{opening.run}/{id}",
            group_index=0,
            group_size=1,
            seed=derive_seed(opening.seed, opening.split, index),
            run_seed=derive_seed(opening.seed, opening.sample_index),
            sampling=opening.sampling,
        )
        session = ExternalSession(core, id, key, opening, task, secret)
        self._watch(key)
        self._open[id] = session
        self._by_secret[digest(secret)] = id
        session.saved.add_done_callback(lambda _: self._remember(id))
        add_ids(**session.log_ids)
        try:
            messages = await session.start()
        except BaseException:
            session.cancel()
            raise
        return session, secret, messages

    def get(self, id: str) -> ExternalSession:
        """A session by its id.

        Raises:
            ApiError: there is none.
        """
        session = self._open.get(id)
        if session is None:
            raise unknown("session", id, UNKNOWN)
        return session

    def by_secret(self, secret: str) -> ExternalSession | None:
        """The session that a key belongs to."""
        id = self._by_secret.get(digest(secret))
        return self._open.get(id) if id is not None else None

    @property
    def all(self) -> list[ExternalSession]:
        """All that are known, oldest first."""
        return list(self._open.values())

    @property
    def open_count(self) -> int:
        """How many `unfinished` there are."""
        return len(self.unfinished)

    @property
    def unfinished(self) -> list[ExternalSession]:
        """Sessions that are not over."""
        return [session for session in self._open.values() if not session.over]

    def of(self, key: Key) -> list[ExternalSession]:
        """The sessions of one key, newest first; all for an admin."""
        return [s for s in reversed(self._open.values()) if s.key.id == key.id or key.may("admin")]

    async def drain(self, timeout: float) -> None:
        """Wait for sessions to end, then cancel the rest."""
        end = time.monotonic() + timeout
        pending = [session.saved for session in self._open.values() if not session.saved.done()]
        if pending:
            await asyncio.wait(pending, timeout=max(0.0, end - time.monotonic()))
        for session in self._open.values():
            session.cancel()
        pending = [session.saved for session in self._open.values() if not session.saved.done()]
        if pending:
            await asyncio.wait(pending, timeout=10.0)

    def _watch(self, key: Key) -> None:
        """End a key's sessions with it."""
        if key is not LOCAL and key.id not in self._watched:
            self._watched.add(key.id)
            self.core.watch.use(key.id, lambda why: self.core.spawn(self._end_with(key, why)))

    async def _end_with(self, key: Key, why: str) -> None:
        self.ended_keys[key.id] = why
        for session in [session for session in self.unfinished if session.key.id == key.id]:
            session.cancel(why)
            await asyncio.sleep(0)

    def _remember(self, id: str) -> None:
        """Keep the outcome of a session that has ended, and forget the oldest one if there are too many."""
        self._ended.append(id)
        if len(self._ended) > KEPT:
            session = self._open.pop(self._ended.popleft())
            self._by_secret.pop(session.secret, None)


def _looked_at(future: asyncio.Future[Any]) -> None:
    """An outcome that nobody asks for is no error of the loop."""
    if not future.cancelled():
        future.exception()
