"""HTTP at the least cost, so that a load test measures what stands between its client and its engine.

    python -m benchmarks.plain_http [--port 0]

runs `benchmarks.fake_engine` without a framework: the same answers to `/generate`, text only, at a fifth of the processor time.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop

from benchmarks.fake_engine import answer

LIMIT = 180.0
"""Seconds for any answer."""
FINE = orjson.dumps({"status": "ok", "weight_version": "0", "model_path": "fake"})


class Connection(asyncio.Protocol):
    """One connection of a client that waits for each answer before it asks again."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[bytes] | None = None
        self._got = b""

    @classmethod
    async def open(cls, url: str) -> Connection:
        """Connect to a server."""
        parts = urlsplit(url)
        _, made = await asyncio.get_running_loop().create_connection(cls, str(parts.hostname), parts.port or 80)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the service closed the connection"))

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, end, body = self._got.partition(b"\r\n\r\n")
        if not end or self._answer is None or self._answer.done():
            return
        if len(body) >= int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]):
            self._got = b""
            self._answer.set_result(head + end + body)

    async def post(self, path: str, body: Any) -> Any:
        """One request with JSON in and out.

        Raises:
            RuntimeError: it was refused.
        """
        data = orjson.dumps(body)
        self._answer = asyncio.get_running_loop().create_future()
        lines = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self.transport.write(lines.encode() + data)
        async with asyncio.timeout(LIMIT):
            raw = await self._answer
        if not raw.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"POST {path}: {raw[:500].decode(errors='replace')}")
        return orjson.loads(raw.partition(b"\r\n\r\n")[2])


class Engine(asyncio.Protocol):
    """One connection of the engine."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url = self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        """A piece of its path."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer it."""
        told = _generated(orjson.loads(self._body)) if self._url == b"/generate" and self._body else FINE
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(told)}\r\n\r\n"
        self.transport.write(head.encode() + told)


def _generated(body: dict[str, Any]) -> bytes:
    sampling = body.get("sampling_params", {})
    one = answer(body["input_ids"], sampling.get("max_new_tokens", 8))
    return orjson.dumps([one] * sampling["n"] if sampling.get("n", 1) > 1 else one)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", port, backlog=4096)
    print(f"engine at http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
