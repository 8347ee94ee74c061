"""Sessions: an agent outside plays an episode over HTTP, and everything its model calls sent and received is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from relax_sdk.config import SamplingParams
from relax_sdk.errors import RelaxError
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.session import Session as AgentSession
from relax_sdk.session import StepOutcome
from relax_sdk.trajectory import Group, Status, Trajectory, derive_seed
from relax_server.api.core import ServiceCore
from relax_server.api.errors import ApiError, as_api_error, bad, unknown
from relax_server.api.keys import Key, digest
from relax_server.engines.base import Generation
from relax_server.rollout.calls import Answer, CallOptions
from relax_server.rollout.context import EpisodeTask
from relax_server.rollout.episode import Episode
from relax_server.rollout.recorder import Shown

RUN = "sessions"
"""The journal's run that sessions belong to if they name none."""
DONE_SECONDS = 60.0
"""Without a call, after which a session whose environment has ended is finished; until then rewards may come from outside."""
KEPT = 4096
"""Ended sessions whose outcome is remembered."""
USABLE = frozenset({Status.COMPLETED, Status.TRUNCATED})


@dataclass(frozen=True)
class Opening:
    """What a session is opened with."""

    env: str
    """`none`: the agent has a world of its own."""
    split: str
    task_index: int
    seed: int
    run: str
    train: bool
    """Sampling is the session's own whatever the agent asks for, and the trajectory is served to trainers."""
    sampling: SamplingParams
    limits: dict[str, Any] = field(default_factory=dict)
    """Changes of the service's `RolloutConfig`."""
    sample_index: int = 0
    """Which of several episodes of the task: its seed follows from it."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Kept with the trajectory."""


class ExternalSession:
    """One episode that is played from outside.

    Args:
        core: of the service.
        id: of the session.
        key: whose it is.
        opening: how it was opened.
        task: the episode.
    """

    def __init__(self, core: ServiceCore, id: str, key: Key, opening: Opening, task: EpisodeTask, secret: str) -> None:
        self.core, self.id, self.key, self.opening = core, id, key, opening
        self._secret = digest(secret)
        self._ready: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()
        self._finish = asyncio.Event()
        self._rewards: dict[str, float] = {}
        self._idle_since = time.monotonic()
        self._calls = 0
        self._watch: asyncio.TimerHandle | None = None
        self.responses: dict[str, list[Message]] = {}
        """Conversations by the id of the response that ended them."""
        self.media_form = "reference"
        """How observations name media."""
        self.saved: asyncio.Future[Trajectory] = asyncio.get_running_loop().create_future()
        """The trajectory, once it is durable."""
        self.saved.add_done_callback(_looked_at)
        spec = core.spec(opening.env)
        config = core.rollout_config(opening.limits)
        context = core.context(opening.run, spec, config, key, self._play, routes=False)
        self.episode = Episode(context, task)

    @property
    def topic(self) -> str:
        """Of its events."""
        return f"session/{self.id}"

    @property
    def over(self) -> bool:
        """Whether nothing more can be done in it."""
        return self.episode.result.done()

    def opens_with(self, secret: str) -> bool:
        """Whether this is the session's own key."""
        return hmac.compare_digest(self._secret, digest(secret))

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
        raise as_api_error(error) if error is not None else ApiError(503, "the session was cancelled", "cancelled")

    async def _play(self, session: AgentSession) -> None:
        """The agent, as the episode sees it."""
        messages = await session.reset()
        self._ready.set_result(messages)
        await self._finish.wait()

    async def generate(
        self,
        messages: list[Message],
        sampling: SamplingParams | None = None,
        tools: list[dict[str, Any]] | None = None,
        tools_key: str = "",
        on_partial: Callable[[Generation], None] | None = None,
        shown: Shown | None = None,
    ) -> Answer:
        """One model call.

        Raises:
            ApiError: the session is over, or its key has used up its tokens.
            RelaxError: as `EpisodeSession.call`.
        """
        self.require_open()
        self.core.rates.check(self.key)
        metrics = self.core.metrics
        try:
            with self._busy(), metrics.seconds.time():
                answer = await self.episode.session.call(messages, CallOptions(sampling, tools, tools_key, on_partial, shown))
        except BaseException as error:
            metrics.calls.labels(type(error).__name__).inc()
            raise
        metrics.calls.labels(answer.turn.finish_reason).inc()
        metrics.tokens.labels("prompt").inc(len(answer.turn.prompt_ids))
        metrics.tokens.labels("response").inc(len(answer.turn.response_ids))
        self.core.rates.take(self.key, len(answer.turn.response_ids))
        number, turn = len(self.episode.session.turns), answer.turn
        counts = {"prompt_tokens": len(turn.prompt_ids), "response_tokens": len(turn.response_ids)}
        self.core.events.add(self.topic, "turn", number=number, finish_reason=turn.finish_reason, **counts)
        return answer

    async def step(self, action: AssistantMessage) -> StepOutcome:
        """Act in the environment; tool calls go to its tools.

        Raises:
            ApiError: the session is over.
            EpisodeError: the environment failed.
        """
        self.require_open()
        session = self.episode.session
        with self._busy():
            outcome = await (session.call_tools(action) if action.tool_calls and session.tools else session.step(action))
        self.core.events.add(
            self.topic, "step", reward=outcome.reward, terminated=outcome.terminated, truncated=outcome.truncated
        )
        return outcome

    def reward(self, name: str, value: float) -> None:
        """Add a component to the reward, or replace one that was set before.

        Raises:
            ApiError: it is not a finite number, or the session is over.
        """
        self.require_open()
        if not name or name == "env":
            raise bad("a reward's name must be a word other than 'env', which is what the environment gives", "name")
        if not math.isfinite(value):
            raise bad(f"reward {name} = {value}; allowed: a finite number", "value")
        self._rewards[name] = float(value)
        self.core.events.add(self.topic, "reward", name=name, value=float(value))

    async def finish(self) -> Trajectory:
        """End the episode and wait until it is scored and durable.

        Raises:
            ApiError: it failed or was cancelled; or it could not be stored.
        """
        if not self.over and not self.episode.session.turns:
            raise bad("the session has no model call yet; make one, or cancel it with DELETE", code="no_turns")
        session = self.episode.session
        if not self.episode.context.observes and session.outcome is not None:
            session.outcome = dataclasses.replace(session.outcome, terminated=True)  # only the agent knows, and it says so
        self._finish.set()
        return await asyncio.shield(self.saved)

    def cancel(self) -> None:
        """End it without a reward; generation in flight is aborted."""
        self.episode.cancel()

    def require_open(self) -> None:
        """Raise if the session is over.

        Raises:
            ApiError: it is; the message says how it ended.
        """
        if self.over:
            trajectory = self.episode.result.result()
            error = f": {trajectory.error}" if trajectory.error else ""
            raise ApiError(400, f"session {self.id} is over ({trajectory.status}{error}); open a new one", "episode_over")
        if self._finish.is_set():
            raise ApiError(400, f"session {self.id} is being scored", "episode_over")

    @property
    def trajectory_id(self) -> str:
        """Of the one it becomes."""
        return self.episode.task.id

    # --------------------------------------------------------------------------------------------------------- ending

    async def _save(self, trajectory: Trajectory) -> None:
        """Make the outcome durable, then tell of it."""
        if self._watch is not None:
            self._watch.cancel()
        if trajectory.status in USABLE:
            trajectory.rewards |= self._rewards
            trajectory.reward += sum(self._rewards.values())
        if self.opening.metadata:
            trajectory.info = {**trajectory.info, "metadata": self.opening.metadata}
        task = self.episode.task
        self.core.metrics.finished.labels(trajectory.status).inc()
        group = Group(task.group_id, trajectory.env, task.task_index, [trajectory])
        split = "train" if self.opening.train and trajectory.status in USABLE else f"session-{self.opening.split}"
        try:
            await self.core.commit(group, self.opening.run, split)
        except RelaxError as error:
            self.saved.set_exception(as_api_error(error))
            return
        self.core.events.add(
            self.topic,
            "finished",
            trajectory_id=trajectory.id,
            status=trajectory.status,
            reward=trajectory.reward,
            rewards=trajectory.rewards,
            error=trajectory.error,
        )
        self.saved.set_result(trajectory)

    @contextlib.contextmanager
    def _busy(self) -> Any:
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._idle_since = time.monotonic()

    def _look_for_idleness(self) -> None:
        """Cancel it when nothing was asked for too long; one whose environment has ended is finished."""
        limit = self.core.config.idle_timeout
        done = self.episode.session.done
        left = (min(limit, DONE_SECONDS) if done else limit) - (time.monotonic() - self._idle_since)
        if self.over:
            return
        if left <= 0 and not self._calls:
            self._finish.set() if done else self.cancel()
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
        self._by_secret: dict[str, str] = {}

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
        core.rates.check(key)
        if core.slots.running[key.id] >= key.episodes:
            message = f"key {key.name!r} has {key.episodes} episodes open already; finish some"
            raise ApiError(429, message, "episodes", headers={"Retry-After": "1"})
        spec = core.spec(opening.env)
        splits = await core.splits(spec)
        if opening.split not in splits:
            raise bad(f"{spec.id} has no split {opening.split!r}; there are {', '.join(splits)}", "split")
        row = await core.media_threads.call(splits[opening.split].row, opening.task_index, limit=60.0)
        id, secret = f"s_{secrets.token_hex(8)}", f"rls_{secrets.token_urlsafe(32)}"
        task = EpisodeTask(
            split=opening.split,
            task_index=opening.task_index,
            row=row,
            group_id=f"{opening.run}/{id}",
            group_index=0,
            group_size=1,
            seed=derive_seed(opening.seed, opening.split, opening.task_index, opening.sample_index),
            sampling=opening.sampling,
        )
        session = ExternalSession(core, id, key, opening, task, secret)
        self._open[id] = session
        self._by_secret[digest(secret)] = id
        self._forget()
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
            raise unknown("session", id, ": it was never opened, or the service was restarted since; open a new one")
        return session

    def by_secret(self, secret: str) -> ExternalSession | None:
        """The session that a key belongs to."""
        id = self._by_secret.get(digest(secret))
        return self._open.get(id) if id is not None else None

    @property
    def open_count(self) -> int:
        """Sessions that are not over."""
        return sum(not session.over for session in self._open.values())

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

    def _forget(self) -> None:
        if len(self._open) > KEPT:
            for id in [id for id, session in self._open.items() if session.saved.done()][: len(self._open) - KEPT]:
                session = self._open.pop(id)
                self._by_secret.pop(session._secret, None)


def _looked_at(future: asyncio.Future[Any]) -> None:
    """An outcome that nobody asks for is no error of the loop."""
    if not future.cancelled():
        future.exception()
