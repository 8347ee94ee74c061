"""A TCP line between two processes that can be cut and mended."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Literal
from urllib.parse import urlsplit


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
