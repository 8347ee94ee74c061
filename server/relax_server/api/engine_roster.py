"""The engines that a service uses, and how each is reached."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from relax_sdk.errors import EngineUnavailable
from relax_server.api.settings import ServiceConfig
from relax_server.api.workers.channel import SUPERVISOR, Message
from relax_server.api.workers.place import WorkerPlace
from relax_server.engines.coalesce import CoalescingEngine
from relax_server.engines.kinds import connect_running
from relax_server.rollout.pool import EnginePool

ENGINES = "engines"
CONNECT_SECONDS = 15.0
"""Seconds for other workers to connect to an engine."""


@dataclass(frozen=True)
class EngineAccess:
    """How an engine is reached."""

    url: str
    token: str = field(default="", repr=False)
    """Shown to it; empty: what `engines.tokens.find_token` finds."""
    inline: bool = True
    """It is sent the bytes of media, as it cannot read the service's files."""

    async def connect(self) -> CoalescingEngine:
        """A client of it.

        Raises:
            EngineUnavailable: it does not answer.
        """
        engine = CoalescingEngine(await connect_running(self.url, self.token, self.inline))
        if not await engine.health():
            await engine.close()
            raise EngineUnavailable(f"the engine {self.url} does not answer; start it first")
        return engine


def named_engines(config: ServiceConfig) -> tuple[EngineAccess, ...]:
    """The engines that a service was told to use; none: it starts one of its own."""
    return tuple(EngineAccess(url, config.engine_token, not config.media_paths) for url in config.engines)


class EngineRoster:
    """The pool's engines, with the way to each, so that all workers of a service use the same ones.

    Args:
        pool: that the engines are in.
        place: of this worker.
    """

    def __init__(self, pool: EnginePool, place: WorkerPlace) -> None:
        self._pool, self._place = pool, place
        place.on(ENGINES, self._told)
        self._known: dict[str, EngineAccess] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def add(self, access: EngineAccess, engine: CoalescingEngine) -> None:
        """Let an engine join."""
        self._known[access.url] = access
        self._pool.add(engine)

    def remove(self, url: str, drain: float) -> None:
        """Give an engine nothing new, and forget it when its calls are done or have begun again elsewhere.

        Args:
            url: of the engine.
            drain: seconds for its calls in flight.
        """
        self._known.pop(url, None)
        task = asyncio.get_running_loop().create_task(self._leave(url, drain))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def follow(self, wanted: Sequence[EngineAccess], drain: float = 0.0) -> None:
        """Use these engines and no others.

        Args:
            wanted: the engines; those that are in use already stay as they are.
            drain: see `remove`.

        Raises:
            EngineUnavailable: a new one does not answer; the others are in use.
        """
        failed: EngineUnavailable | None = None
        for access in wanted:
            if self._known.get(access.url) != access:
                try:
                    self.add(access, await access.connect())
                except EngineUnavailable as error:
                    failed = error
        for url in self._known.keys() - {access.url for access in wanted}:
            self.remove(url, drain)
        if failed is not None:
            raise failed

    async def replace(self, url: str, access: EngineAccess) -> None:
        """Use an engine in place of one that has gone, and the others as before.

        Args:
            url: of the one that has gone.
            access: the new one.

        Raises:
            EngineUnavailable: it does not answer; nothing has changed.
        """
        engine = await access.connect()
        self.remove(url, 0.0)
        self.add(access, engine)

    async def share(self, drain: float = 0.0) -> None:
        """Let the other workers, and those that are started later, use these engines and no others.

        Args:
            drain: see `remove`.
        """
        if not self._place.alone:
            rows = [asdict(access) for access in self._known.values()]
            self._place.tell(SUPERVISOR, ENGINES, engines=rows)
            await self._place.ask_others(ENGINES, seconds=CONNECT_SECONDS, engines=rows, drain=drain)

    async def _told(self, message: Message) -> None:
        body = message.body
        await self.follow([EngineAccess(**row) for row in body["engines"]], body["drain"])

    async def _leave(self, url: str, drain: float) -> None:
        engine = next((engine for engine in self._pool.engines if engine.url == url), None)
        await self._pool.remove(url, drain, move=True)
        if engine is not None and engine not in self._pool.engines:
            await engine.close()
