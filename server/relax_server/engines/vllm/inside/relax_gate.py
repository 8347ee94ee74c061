"""Runs inside vLLM: a middleware by which every answer comes from one version of the weights and names it.

OpenAI's routes have no word for what an engine in training is told, so those of SGLang are added: pause, go on, abort, new
weights. All requests for answers pass the gate. Weights change only while the gate is closed and no request is behind it; one
that was under way ends with `finish_reason` `abort` and the tokens it has, for its sender to go on from.

Of the standard library only, as it is imported in vLLM's environment. Written for vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Outbox = asyncio.Queue[MutableMapping[str, Any] | None]
"""What is on its way to a reader; None is its end."""

RID = b"x-relax-rid"
"""Names a request, so that it can be aborted."""
VERSION = b"x-relax-weight-version"
"""Header with the version of the weights that an answer comes from."""

DRAIN_SECONDS = 0.05
"""Seconds between attempts to end what runs: a request that has just come reaches the engine after the first."""

END_SECONDS = 60.0
"""Seconds for all that runs to end once it was told to."""


class Refused(Exception):
    """A command cannot be carried out; the text says why."""


class Call:
    """One request for an answer, which can be ended from outside as if its sender had gone."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.stopped = asyncio.Event()
        self.begun = False
        """Part of its answer is out."""

    def receive(self, receive: Receive) -> Receive:
        async def read() -> MutableMapping[str, Any]:
            message, stop = asyncio.ensure_future(receive()), asyncio.ensure_future(self.stopped.wait())
            try:
                await asyncio.wait({message, stop}, return_when=asyncio.FIRST_COMPLETED)
                return {"type": "http.disconnect"} if self.stopped.is_set() else message.result()
            finally:
                stop.cancel()
                message.cancel()

        return read

    def send(self, out: Outbox, version: str) -> Send:
        async def write(message: MutableMapping[str, Any]) -> None:
            if self.stopped.is_set():
                return
            if message["type"] == "http.response.start":
                self.begun = True
                message = {**message, "headers": [*message.get("headers", ()), (VERSION, version.encode())]}
            out.put_nowait(message)

        return write


class Gate:
    """The middleware.

    Args:
        app: the rest of the server.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._version = os.environ.get("RELAX_WEIGHT_VERSION", "0")
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._waiting: set[Call] = set()
        self._running: set[Call] = set()
        self._frozen = False
        self._command = asyncio.Lock()
        self._commands: dict[str, Callable[[Any, dict[str, Any]], Awaitable[Any]]] = {
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/flush_cache": self._flush,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume_memory,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif path in self._commands or path in ("/abort_request", "/server_info", "/model_info"):
            await self._answer(scope["app"].state.engine_client, path, receive, send)
        elif scope["method"] == "POST" and path.startswith("/v1/"):
            await self._pass(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    # ---------------------------------------------------------------------------------------------------- answers

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(dict(scope["headers"]).get(RID, b"").decode())
        self._waiting.add(call)
        try:
            while not (self._open.is_set() or call.stopped.is_set()):
                await _either(self._open, call.stopped)
        finally:
            self._waiting.discard(call)
        if not call.stopped.is_set():
            await self._run(call, scope, receive, send)
        if call.stopped.is_set():
            error = {"error": {"message": "the request was aborted", "code": 499}}
            if call.begun:
                body = b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n"
                await send({"type": "http.response.body", "body": body})
            else:
                await _reply(send, 499, error)

    async def _run(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """Let vLLM answer. It runs until the last token is there, not until a slow reader has read it."""
        out: Outbox = asyncio.Queue()
        sending = asyncio.ensure_future(_send_all(out, send))
        self._running.add(call)
        self._idle.clear()
        try:
            # Below ASGI 2.4 a stream, too, notices through `receive` that its reader has gone.
            old = {**scope, "asgi": {**scope["asgi"], "spec_version": "2.3"}}
            await self._app(old, call.receive(receive), call.send(out, self._version))
        except BaseException:
            sending.cancel()
            raise
        finally:
            self._running.discard(call)
            if not self._running:
                self._idle.set()
        out.put_nowait(None)
        with contextlib.suppress(OSError):  # its reader has gone
            await sending

    # ---------------------------------------------------------------------------------------------------- commands

    async def _answer(self, engine: Any, path: str, receive: Receive, send: Send) -> None:
        try:
            body = json.loads(await _body(receive) or b"{}")
            if path == "/abort_request":
                answer: Any = self._stop(None if body.get("abort_all") else str(body.get("rid", "")))
            elif path == "/server_info":
                answer = self._info(engine)
            elif path == "/model_info":
                answer = {"model_path": engine.vllm_config.model_config.model, "weight_version": self._version}
            else:
                async with self._command:
                    answer = await self._commands[path](engine, body)
        except (Refused, ValueError) as error:
            await _reply(send, 400, {"error": {"message": str(error)}})
        except Exception as error:
            await _reply(send, 500, {"error": {"message": f"{type(error).__name__}: {error}"}})
        else:
            await _reply(send, 200, answer)

    def _info(self, engine: Any) -> dict[str, Any]:
        config = engine.vllm_config
        return {
            "engine": "vllm",
            "running": len(self._running),
            "waiting": len(self._waiting),
            "cached_tokens": None,
            "weight_version": self._version,
            "paused": not self._open.is_set(),
            "max_model_len": config.model_config.max_model_len,
            "block_size": config.cache_config.block_size,
        }

    def _stop(self, rid: str | None) -> None:
        """End one request, or all."""
        for call in (*self._waiting, *self._running):
            if rid is None or call.rid == rid:
                call.stopped.set()

    async def _pause(self, engine: Any, body: dict[str, Any]) -> None:
        mode = body.get("mode", "abort")
        self._open.clear()
        if mode == "abort":
            self._stop(None)
            await self._ended(END_SECONDS)
        elif mode == "retract":
            await self._drain(engine)
        elif mode == "in_place":
            await engine.pause_generation(mode="keep", clear_cache=False)
            self._frozen = True
        else:
            raise Refused(f"pause mode {mode!r}; allowed: abort, retract, in_place")

    async def _continue(self, engine: Any, body: dict[str, Any]) -> None:
        await self._thaw(engine)
        self._open.set()

    async def _thaw(self, engine: Any) -> None:
        if self._frozen:
            await engine.resume_generation()
            self._frozen = False

    async def _drain(self, engine: Any) -> None:
        """Behind the closed gate, requests end with what they have."""
        until = time.monotonic() + END_SECONDS
        while self._running and time.monotonic() < until:
            await engine.pause_generation(mode="abort", clear_cache=False)
            await engine.resume_generation()
            self._frozen = False
            with contextlib.suppress(Refused):
                await self._ended(DRAIN_SECONDS)
        await self._ended(DRAIN_SECONDS)

    async def _ended(self, seconds: float) -> None:
        """Wait until nothing runs.

        Raises:
            Refused: something still did after so long.
        """
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            raise Refused(f"{len(self._running)} requests have not ended within {seconds:g} s") from None

    async def _update(self, engine: Any, body: dict[str, Any]) -> dict[str, Any]:
        """New weights; a gate that was open opens again."""
        path, version = str(body["model_path"]), str(body["weight_version"])
        opened = self._open.is_set()
        self._open.clear()
        try:
            await self._drain(engine)
            await self._thaw(engine)
            if body.get("flush_cache", True):
                await self._flush(engine, body)
        except Refused:
            if opened:
                self._open.set()
            raise
        # Were this to fail, the weights could be mixed: nobody passes until others were loaded.
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": path})
        self._version = version
        if opened:
            self._open.set()
        return {"success": True, "message": ""}

    async def _flush(self, engine: Any, body: dict[str, Any]) -> None:
        if not await engine.reset_prefix_cache():
            raise Refused("the cache cannot be flushed while requests run; pause first, or wait for them")

    async def _release(self, engine: Any, body: dict[str, Any]) -> None:
        self._need_sleep(engine)
        if self._open.is_set() or self._running:
            raise Refused("memory is given back only while generation is paused and no request is left")
        await engine.sleep(level=2)

    async def _resume_memory(self, engine: Any, body: dict[str, Any]) -> None:
        self._need_sleep(engine)
        await engine.wake_up()

    def _need_sleep(self, engine: Any) -> None:
        if not engine.vllm_config.model_config.enable_sleep_mode:
            raise Refused("vLLM gives memory back only when it was started with --enable-sleep-mode, on a GPU")


async def _send_all(out: Outbox, send: Send) -> None:
    while (message := await out.get()) is not None:
        await send(message)


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def _body(receive: Receive) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _reply(send: Send, status: int, answer: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})
