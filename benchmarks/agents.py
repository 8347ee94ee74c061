"""Agents of the load tests: one session each of our service, over HTTP or over its WebSocket, by aiohttp."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

LIMIT = 180.0
"""Seconds for any answer."""
TOKENS = 8
"""Tokens of an answer; so many the fake engine has."""


@contextlib.asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """With as many connections as are wanted."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(LIMIT)) as http:
        yield http


async def ask(http: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> Any:
    """One request with JSON in and out.

    Raises:
        RuntimeError: it was refused.
    """
    data = None if body is None else orjson.dumps(body)
    async with http.request(method, url, data=data, headers={"Content-Type": "application/json"}) as answer:
        raw = await answer.read()
    if answer.status >= 300:
        raise RuntimeError(f"{method} {url}: {answer.status}, {raw[:500].decode(errors='replace')}")
    return orjson.loads(raw) if raw else None


class Session:
    """A session over HTTP.

    Args:
        http: the client.
        service: URL.
    """

    def __init__(self, http: aiohttp.ClientSession, service: str) -> None:
        self.http, self.service = http, service
        self.url = self.key = ""

    async def open(self, **body: Any) -> list[dict[str, Any]]:
        """Open it; returns the first observation.

        Args:
            body: of the request; without `env` the agent has a world of its own.
        """
        opened = await ask(self.http, "POST", f"{self.service}/v1/sessions", {"sampling": {"max_new_tokens": TOKENS}} | body)
        self.url, self.key = f"{self.service}/v1/sessions/{opened['id']}", opened["key"]
        return opened["observation"]

    async def chat(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """One model call; returns the message."""
        body = {"model": "policy", "messages": messages}
        return (await ask(self.http, "POST", f"{self.url}/openai/v1/chat/completions", body))["choices"][0]["message"]

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        """One step of the environment."""
        return await ask(self.http, "POST", f"{self.url}/step", {"action": action})

    async def finish(self) -> dict[str, Any]:
        """Answered when the trajectory is durable."""
        return await ask(self.http, "POST", f"{self.url}/finish")


class SocketSession(Session):
    """A session that is opened and played over one WebSocket."""

    socket: aiohttp.ClientWebSocketResponse

    async def open(self, **body: Any) -> list[dict[str, Any]]:
        self._ids = itertools.count()
        self.socket = await self.http.ws_connect(f"{self.service}/v1/sessions/ws", max_msg_size=0)
        opened = await self._ask({"op": "open", "sampling": {"max_new_tokens": TOKENS}} | body)
        self.url, self.key = f"{self.service}/v1/sessions/{opened['id']}", opened["key"]
        return opened["observation"]

    async def chat(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return (await self._ask({"op": "generate", "model": "policy", "messages": messages}))["choices"][0]["message"]

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        return await self._ask({"op": "step", "action": action})

    async def finish(self) -> dict[str, Any]:
        done = await self._ask({"op": "finish"})
        await self.socket.close()
        return done

    async def _ask(self, body: dict[str, Any]) -> Any:
        answer = await exchange(self.socket, body | {"id": next(self._ids)})
        if "error" in answer:
            raise RuntimeError(f"{body['op']}: {answer['error']}")
        return answer["result"]


async def exchange(socket: aiohttp.ClientWebSocketResponse, body: dict[str, Any]) -> dict[str, Any]:
    """One message each way.

    Raises:
        RuntimeError: the socket was closed.
    """
    await socket.send_str(orjson.dumps(body).decode())
    message = await socket.receive(LIMIT)
    if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
        raise RuntimeError(f"the socket was closed: {message.type.name} {message.data} {message.extra}")
    return orjson.loads(message.data)


async def play(session: Session, env: str, task: int) -> None:
    """One episode of an environment's task, from opening to a durable trajectory."""
    messages = await session.open(env=env, task_index=task)
    while True:
        action = await session.chat(messages)
        outcome = await session.step(action)
        if outcome["terminated"] or outcome["truncated"]:
            break
        messages += [action, *outcome["observation"]]
    done = await session.finish()
    if done["status"] != "completed":
        raise RuntimeError(f"an episode of {env} was {done['status']}: {done['error']}")
