"""A TCP line between two processes that can be cut and mended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from relax_server.engines.process import EngineProcess
from relax_server.engines.settings import EngineSettings
from relax_server.guard import new_token
from relax_server.models.catalog import resolve_model

T = TypeVar("T")
LIMIT = 120.0
"""Seconds for a start or an end."""


class Line:
    """Carries connections to a server.

    A line that is cut with `reset` breaks the connections there are and takes no new ones; one that is `silent` keeps them
    and carries nothing until it is mended.
    """

    def __init__(self, url: str) -> None:
        self.url = ""
        self.held = 0
        """Portions that came while it was silent."""
        self._there = urlsplit(url)
        self._open = asyncio.Event()
        self._open.set()
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self, how: Literal["reset", "silent"]) -> None:
        self._open.clear()
        self._refuses = how == "reset"
        for writer in list(self._writers) if self._refuses else []:
            writer.transport.abort()

    def mend(self) -> None:
        self._refuses = False
        self._open.set()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        if self._refuses:
            writer.transport.abort()
            return
        other, there = await asyncio.open_connection(self._there.hostname, self._there.port)
        self._writers |= {writer, there}
        try:
            await asyncio.gather(self._pump(reader, there), self._pump(other, writer))
        finally:
            self._writers -= {writer, there}
            writer.close()
            there.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.held += not self._open.is_set()
                await self._open.wait()
                writer.write(data)
                await writer.drain()
            writer.write_eof()


@contextlib.asynccontextmanager
async def line_to(url: str) -> AsyncIterator[Line]:
    """A line to the server at `url`, with a URL of its own."""
    line = Line(url)
    server = await asyncio.start_server(line.carry, "127.0.0.1", 0)
    line.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield line
    finally:
        server.close()
        line.cut("reset")
        line.mend()  # nothing waits for it any more


class FarEngine:
    """An engine of one model in a process of its own, reached over a line that can be cut; both are kept by a thread.

    Args:
        model: a model folder or a built-in name.
        media_root: the only folder media paths may point into.
        log: where the engine's output goes.
    """

    def __init__(self, model: str, media_root: Path, log: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="far-engine", daemon=True)
        self._thread.start()
        self._ends = contextlib.AsyncExitStack()
        self.token = new_token()
        """What the engine wants to be shown."""
        try:
            self._line = self._do(self._start(model, media_root, log))
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        return self._line.url

    def cut(self, how: Literal["reset", "silent"]) -> None:
        """See `Line`."""
        self._loop.call_soon_threadsafe(self._line.cut, how)

    def mend(self) -> None:
        """Everything goes through again."""
        self._loop.call_soon_threadsafe(self._line.mend)

    def close(self) -> None:
        """End the engine, the line and the thread."""
        self._do(self._ends.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT)

    async def _start(self, model: str, media_root: Path, log: Path) -> Line:
        process = EngineProcess(resolve_model(model), log, EngineSettings(media_root=media_root, token=self.token))
        self._ends.push_async_callback(process.stop)
        await process.start(LIMIT)
        return await self._ends.enter_async_context(line_to(process.url))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(2 * LIMIT)
