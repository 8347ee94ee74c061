"""Sessions: an agent outside plays an episode over HTTP, and everything its model calls sent and received is recorded."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from relax_sdk.config import SamplingParams
from relax_sdk.errors import JournalError, RelaxError, UnstorableError
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.session import Session as AgentSession
from relax_sdk.session import StepOutcome
from relax_sdk.trajectory import Group, Status, derive_seed
from relax_server.api.core import ServiceCore
from relax_server.api.keys import LOCAL, Key
from relax_server.api.logs import FIELDS
from relax_server.api.next_task import NextTasks
from relax_server.api.outcomes import SAVE_SECONDS, EndedSession, Keeping
from relax_server.api.quotas import AskedSlot
from relax_server.api.trajectories import finished
from relax_server.gateway.bodies import RewardBody
from relax_server.gateway.digest import digest
from relax_server.gateway.errors import ApiError, as_api_error, bad, unknown
from relax_server.gateway.played import PlayedSession, over
from relax_server.log_ids import add_ids
from relax_server.rollout.calls import Answer, CallOptions
from relax_server.rollout.episode import USABLE, Episode
from relax_server.rollout.task import EpisodeTask

SESSIONS = "sessions"
"""What other workers are asked for their sessions with."""
RUN = "sessions"
"""Begins the name of the journal's run that sessions belong to if they name none."""
DONE_SECONDS = 60.0
"""Seconds without a call after which a session whose environment has ended is finished; until then rewards may come from
outside."""
KEPT = 4096
"""Ended sessions that are durable and whose outcome is remembered."""
MOST_WAITING = 1024
"""Sessions that have ended and cannot be made durable, until no more are opened."""
SECRET = "rls_"
"""Begins the keys of sessions."""
UNKNOWN = ": it was not opened at this server, or that was killed or restarted since; open a new one"
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


class SessionHub:
    """All sessions of the service.

    Args:
        core: of the service.
    """

    def __init__(self, core: ServiceCore) -> None:
        self.core = core
        core.place.on(SESSIONS, lambda message: self._of(**message.body))
        self._open: dict[str, ExternalSession] = {}
        """Sessions that are open, or over and not durable yet."""
        self._ended: dict[str, EndedSession] = {}
        """What is kept of the others, the first to end first."""
        self._by_secret: dict[str, str] = {}
        self._playing = 0
        self._tasks = NextTasks()
        self.ended_keys: dict[str, str] = {}
        """Keys that opened sessions and were revoked or have expired since, and which it was; the sessions' keys ended with
        them."""
        self._watched: set[str] = set()

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
        if len(self._open) >= MOST_WAITING and sum(session.over for session in self._open.values()) >= MOST_WAITING:
            raise JournalError(f"{MOST_WAITING} sessions wait for a journal that cannot be written")
        if not core.gate.is_set():
            raise ApiError(503, "the service is paused; try again later", "paused", headers={"Retry-After": "5"})
        core.rates.check(key)
        place = await core.slots.reserve(key)
        try:
            return await self._open_at(place, opening, key)
        finally:
            place.drop()

    async def _open_at(self, place: AskedSlot, opening: Opening, key: Key) -> tuple[ExternalSession, str, list[Message]]:
        core = self.core
        await core.own_run(opening.run, key)
        spec = await core.envs.find(opening.env)
        await core.envs.require_time(opening.env)
        splits = await core.splits(spec)
        if opening.split not in splits:
            raise bad(f"{spec.id} has no split {opening.split!r}; there are {', '.join(splits)}", "split")
        rows = splits[opening.split]
        seed = opening.seed if opening.seeded else None
        index = self._tasks.pick(rows, (key.id, spec.id, opening.split), opening.task_index, seed)
        row = rows.row(index) if rows.at_hand else await core.media_threads.call(rows.row, index, limit=60.0)
        id, secret = (f"s_{self._marked(secrets.token_hex(8))}", f"{SECRET}{self._marked(secrets.token_urlsafe(32))}")
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
        session = ExternalSession(core, id, key, opening, task, secret, self._remember, place)
        self._watch(key)
        self._open[id] = session
        self._count(1)
        session.episode.result.add_done_callback(lambda _: self._count(-1))
        self._by_secret[digest(secret)] = id
        add_ids(**session.log_ids)
        try:
            messages = await session.start()
        except BaseException:
            session.cancel()
            raise
        return session, secret, messages

    def _marked(self, random: str) -> str:
        """The random part of an id or a key, in which worker and service are named."""
        return self.core.config.signed(self.core.place.marked(random))

    def get(self, id: str) -> AnySession:
        """A session by its id.

        Raises:
            ApiError: there is none.
        """
        session = self._open.get(id) or self._ended.get(id)
        if session is None:
            raise unknown("session", id, UNKNOWN)
        return session

    def by_secret(self, secret: str) -> AnySession | None:
        """The session that a key belongs to."""
        id = self._by_secret.get(digest(secret))
        return None if id is None else self._open.get(id) or self._ended.get(id)

    @property
    def open_count(self) -> int:
        """How many `unfinished` there are."""
        return len(self.unfinished)

    @property
    def unfinished(self) -> list[ExternalSession]:
        """Sessions that are not over."""
        return [session for session in self._open.values() if not session.over]

    async def of(self, key: Key, limit: int) -> list[dict[str, Any]]:
        """The sessions of one key as clients are told of them, all for an admin.

        Args:
            key: whose.
            limit: how many at most: the newest first, behind the open ones those that are over.
        """
        asked: dict[str, Any] = {"key": None if key.may("admin") else key.id, "limit": limit}
        place = self.core.place
        parts = [self._of(**asked), *(await place.ask_others(SESSIONS, **asked)).values()]
        found = [row for part in ("open", "over") for row in newest([rows[part] for rows in parts])]
        return found[:limit]

    def _of(self, key: str | None, limit: int) -> dict[str, Any]:
        """The sessions here of one key, or of all, as `of` puts those of all workers together."""
        parts: dict[str, list[Any]] = {"open": [], "over": []}
        for name, known in (("open", self._open), ("over", self._ended)):
            mine = (session.state for session in reversed(known.values()) if key in (None, session.key.id))
            parts[name] = list(itertools.islice(mine, limit))
        return parts

    async def drain(self, why: str = "cancelled", seconds: float = SAVE_SECONDS) -> None:
        """Cancel what is open, and wait until everything is durable; what could not be written is tried once more.

        Args:
            why: told to the clients of what is cancelled.
            seconds: to wait at most.
        """
        for session in self.unfinished:
            session.cancel(why)
        left = [asyncio.ensure_future(session.keeping.insist()) for session in self._open.values()]
        if left:
            await asyncio.wait(left, timeout=seconds)
        for waiting in left:
            waiting.cancel()
        if self._open:
            logger.error("%d sessions could not be stored before the service ends", len(self._open))

    def _count(self, more: int) -> None:
        """Let all workers see how many sessions are not over here."""
        self._playing += more
        self.core.place.board.set_sessions(self.core.place.index, self._playing)

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

    def _remember(self, ended: EndedSession) -> None:
        """Keep the outcome of a session that has ended in place of the session, and forget the oldest one if there are many."""
        self._open.pop(ended.id, None)
        self._ended[ended.id] = ended
        if len(self._ended) > KEPT:
            oldest = self._ended.pop(next(iter(self._ended)))
            self._by_secret.pop(oldest.secret, None)


def newest(parts: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Lists of sessions, each with the newest one first, as one such list."""
    return parts[0] if len(parts) == 1 else sorted(itertools.chain(*parts), key=lambda row: -row["opened_at"])


def default_run(key: Key) -> str:
    """The journal's run of a key's sessions that name none."""
    return RUN if key is LOCAL else f"{RUN}:{key.id}"
