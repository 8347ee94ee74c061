"""`SessionHub`: all sessions of the service: opened, found, ended with their keys, and remembered."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from relax_sdk.errors import JournalError
from relax_sdk.messages import Message
from relax_sdk.trajectory import derive_seed
from relax_server.api.core import ServiceCore
from relax_server.api.external_session import AnySession, ExternalSession, Opening
from relax_server.api.keys import LOCAL, Key
from relax_server.api.next_task import NextTasks
from relax_server.api.outcomes import SAVE_SECONDS, EndedSession
from relax_server.api.quotas import AskedSlot
from relax_server.gateway.digest import digest
from relax_server.gateway.errors import ApiError, bad, unknown
from relax_server.log_ids import add_ids
from relax_server.rollout.task import EpisodeTask

SESSIONS = "sessions"
"""What other workers are asked for their sessions with."""
RUN = "sessions"
"""Begins the name of the journal's run that sessions belong to if they name none."""
KEPT = 4096
"""Ended sessions that are durable and whose outcome is remembered."""
MOST_WAITING = 1024
"""Sessions that have ended and cannot be made durable, until no more are opened."""
SECRET = "rls_"
"""Begins the keys of sessions."""
UNKNOWN = ": it was not opened at this server, or that was killed or restarted since; open a new one"
logger = logging.getLogger(__name__)


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
        self._tasks = NextTasks(core.place)
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
        index = await self._tasks.pick(rows, (key.id, spec.id, opening.split), opening.task_index, seed)
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
