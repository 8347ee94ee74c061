"""A session over one WebSocket, for agents that step fast: a request and its answer are one message each way."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect

from relax_sdk.errors import RelaxError
from relax_server.api import openai_chat
from relax_server.api.actions import known_media, take_step
from relax_server.api.auth import session_of
from relax_server.api.core import ServiceCore
from relax_server.api.errors import as_api_error, bad
from relax_server.api.sessions import ExternalSession

router = APIRouter()

AT_ONCE = 64
"""Requests of one connection that are worked on together; more wait unread."""
UNAUTHORISED, TOO_BIG = 4401, 1009


@router.websocket("/v1/sessions/{id}/ws")
async def session_socket(socket: WebSocket, id: str) -> None:
    """`{"id": …, "op": "generate" | "step" | "reward" | "finish" | "cancel", …}`, answered by `{"id": …, "result": …}` or
    `{"id": …, "error": …}`; the fields are those of the routes of the same names, `generate` takes a chat request."""
    core: ServiceCore = socket.app.state.core
    try:
        session = await session_of(socket, core, socket.app.state.hub, id)
    except RelaxError as error:
        await socket.close(UNAUTHORISED, str(error)[:100])
        return
    await socket.accept()
    gate, tasks = asyncio.Semaphore(AT_ONCE), set[asyncio.Task[None]]()

    async def work(raw: str | bytes) -> None:
        try:
            answer = await _answer(core, session, raw)
            await socket.send_bytes(orjson.dumps(answer, default=str, option=orjson.OPT_SERIALIZE_NUMPY))
        except (WebSocketDisconnect, RuntimeError):
            return  # nobody is there any more
        finally:
            gate.release()

    try:
        while True:
            await gate.acquire()
            message = await socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            raw = message.get("bytes") or message.get("text") or b""
            if len(raw) > core.config.max_body:
                await socket.close(TOO_BIG, f"a message has more than {core.config.max_body} bytes")
                return
            task = asyncio.get_running_loop().create_task(work(raw))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()


async def _answer(core: ServiceCore, session: ExternalSession, raw: str | bytes) -> dict[str, Any]:
    """The answer to one message."""
    id: Any = None
    try:
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise bad(f"the message is not JSON: {error}", code="invalid_json") from error
        if not isinstance(body, dict):
            raise bad("the message must be a JSON object")
        id = body.get("id")
        return {"id": id, "result": await _carry_out(core, session, body)}
    except RelaxError as error:
        return {"id": id} | as_api_error(error).body


async def _carry_out(core: ServiceCore, session: ExternalSession, body: dict[str, Any]) -> Any:
    match body.get("op"):
        case "generate":
            refs = await known_media(core, body.get("messages"))
            call = openai_chat.read_chat(body, session.sampling, refs, session.fixed)
            if call.stream:
                raise bad("a socket does not stream; use the chat route", "stream", "unsupported")
            stop, processor = call.sampling.stop, core.processor
            answer = await session.generate(
                call.messages,
                call.sampling,
                call.tools,
                call.tools_key,
                shown=lambda message, turn: openai_chat.shown(message, turn, stop, processor),
            )
            return openai_chat.completion(f"chatcmpl-{session.id}", call, answer, processor)
        case "step":
            return await take_step(core, session, body.get("action"))
        case "reward":
            value, name = body.get("value"), body.get("name", "reward")
            if not isinstance(value, (int, float)) or not isinstance(name, str):
                raise bad("a reward needs a number as its value, and a name", "value")
            session.reward(name, value)
            return {"name": name, "value": value}
        case "finish":
            return await session.finish()
        case "cancel":
            session.cancel()
            return {}
        case other:
            raise bad(f"op = {other!r}; allowed: generate, step, reward, finish, cancel", "op")
