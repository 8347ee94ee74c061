"""Sessions over a WebSocket, for agents that step fast: a request and its answer are one message each way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from relax_sdk.config import SamplingParams
from relax_sdk.errors import RelaxError
from relax_sdk.media import MediaKey, MediaRef
from relax_sdk.storable import check_storable
from relax_server.api.auth import caller, session_of, watched
from relax_server.api.core import ServiceCore
from relax_server.api.external_session import AnySession, ExternalSession, still_open
from relax_server.api.key_watch import REASON_LENGTH, UNAUTHORISED, hang_up
from relax_server.api.keys import Key
from relax_server.api.opening import open_session
from relax_server.api.schemas import SessionBody
from relax_server.api.sessions import SessionHub
from relax_server.gateway import openai_chat
from relax_server.gateway.bodies import RewardBody, StepBody, checked
from relax_server.gateway.errors import ApiError, as_api_error, bad
from relax_server.gateway.model_route import LONG_ANSWER
from relax_server.gateway.played import PlayedSession
from relax_server.gateway.reading import Parsed, parse, understand
from relax_server.gateway.step import take_step
from relax_server.json_form import as_json
from relax_server.rollout.calls import CallOptions

logger = logging.getLogger(__name__)

AT_ONCE = 64
"""Requests of one connection that are worked on together; more wait unread."""
TOO_BIG = 1009


class SessionSocket:
    """`{"id": …, "op": …, …}`, answered by `{"id": …, "result": …}` or `{"id": …, "error": …}`.

    `op` is `open`, `generate`, `step`, `reward`, `finish` or `cancel`; the fields are those of the routes of the same names,
    `generate` takes a chat request.

    Args:
        core: of the service.
        hub: of its sessions.
    """

    def __init__(self, core: ServiceCore, hub: SessionHub) -> None:
        self.core, self.hub = core, hub

    @property
    def routes(self) -> list[WebSocketRoute]:
        """A connection to a session that is open, and one that opens its own, one after the other."""
        return [WebSocketRoute("/v1/sessions/ws", self.fresh), WebSocketRoute("/v1/sessions/{id}/ws", self.attached)]

    async def attached(self, socket: WebSocket) -> None:
        """Serve the session in the path."""
        try:
            session = await session_of(socket, self.core, self.hub, socket.path_params["id"])
        except RelaxError as error:
            await socket.close(UNAUTHORISED, str(error)[:REASON_LENGTH])
            return
        await _Connection(self, socket, session).serve()

    async def fresh(self, socket: WebSocket) -> None:
        """Serve sessions that are opened over it."""
        try:
            key = await caller(socket, self.core)
        except RelaxError as error:
            await socket.close(UNAUTHORISED, str(error)[:REASON_LENGTH])
            return
        await _Connection(self, socket, None, key).serve()


class _Connection:
    """One client, and the session it plays.

    Args:
        around: the service.
        socket: to the client.
        session: None: none yet.
        key: that may open one.
    """

    def __init__(self, around: SessionSocket, socket: WebSocket, session: AnySession | None, key: Key | None = None) -> None:
        self.core, self.hub, self.socket, self.key = around.core, around.hub, socket, key
        self._session = session
        self._opening = False
        owner = session.key if session is not None else key
        assert owner is not None
        self._owner = owner.id
        self._work = self.core.work.of(owner.id)

    async def serve(self) -> None:
        """Answer until the client goes away; its session stays, until it has been idle for too long."""
        await self.socket.accept()
        gate, tasks = asyncio.Semaphore(AT_ONCE), set[asyncio.Task[None]]()

        async def work(raw: str | bytes) -> None:
            try:
                answer = await self._answer(raw)
                await self.socket.send_bytes(as_json(answer))
            except (WebSocketDisconnect, RuntimeError):
                return  # nobody is there any more
            finally:
                gate.release()

        def ended(why: str) -> None:
            self.core.spawn(hang_up(self.socket, why))

        over = self.core.watch.use(watched(self.socket), ended)
        try:
            while True:
                await gate.acquire()
                message = await self.socket.receive()
                if message["type"] == "websocket.disconnect":
                    return
                raw = message.get("bytes") or message.get("text") or b""
                if len(raw) > self.core.config.max_body:
                    await self.socket.close(TOO_BIG, f"a message has more than {self.core.config.max_body} bytes")
                    return
                task = asyncio.get_running_loop().create_task(work(raw))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        finally:
            over()
            for task in tasks:
                task.cancel()

    async def _answer(self, raw: str | bytes) -> dict[str, Any]:
        """The answer to one message."""
        id: Any = None
        try:
            await self.core.refusals.turn(self._owner)
            parsed = await parse(raw, self._work)
            if not isinstance(parsed.value, dict):
                raise bad("the message must be a JSON object")
            named = parsed.value.pop("id", None)
            check_storable(named, "id")
            id = named
            return {"id": id, "result": await self._carry_out(parsed.value.pop("op", None), parsed)}
        except RelaxError as error:
            told = as_api_error(error)
            if told.status < 500:
                self.core.refusals.note(self._owner)
            return {"id": id} | told.body
        except Exception as error:  # else nobody would ever answer
            logger.exception("a message of a session failed")
            message = f"the service failed: {type(error).__name__}; see its log"
            return {"id": id} | ApiError(500, message, "internal_error").body

    async def _carry_out(self, op: Any, parsed: Parsed) -> Any:
        body = parsed.value
        match op:
            case "open":
                return await self._open(body)
            case "generate":
                return await self._generate(parsed)
            case "step":
                return await take_step(self.core, self.session, checked(StepBody, body))
            case "reward":
                return self.session.reward(checked(RewardBody, body))
            case "finish":
                return await self._finish()
            case "cancel":
                if isinstance(self._known, ExternalSession):
                    self._known.cancel()
                return {}
            case other:
                raise bad(f"op = {other!r}; allowed: open, generate, step, reward, finish, cancel", "op")

    @property
    def _known(self) -> AnySession:
        """The one that is played, or was.

        Raises:
            ApiError: there is none yet.
        """
        if self._session is None:
            raise bad("no session yet; send op = open, and wait for its answer", "op", "no_session")
        return self._session

    @property
    def session(self) -> ExternalSession:
        """The one that is played.

        Raises:
            ApiError: there is none yet, or it is over.
        """
        return still_open(self._known)

    async def _finish(self) -> dict[str, Any]:
        """End the session; of one that is durable only the outcome is kept here, too."""
        session = self._known
        outcome = await session.finish()
        if session is self._session:
            self._session = self.hub.get(session.id)
        return outcome

    async def _open(self, body: dict[str, Any]) -> Any:
        if self.key is None:
            raise bad("this connection belongs to one session; open others over /v1/sessions/ws", "op")
        if self._opening or (isinstance(self._session, ExternalSession) and not self._session.over):
            raise bad("this connection has an open session; finish or cancel it first", "op", "session_open")
        wanted = checked(SessionBody, body)
        url = self.socket.base_url
        base = url.replace(scheme="https" if url.scheme == "wss" else "http")
        self._opening = True
        try:
            self._session, told = await open_session(self.core, self.hub, self.key, wanted, str(base))
        finally:
            self._opening = False
        return told

    async def _generate(self, body: Parsed) -> Any:
        session, processor = self.session, self.core.processor
        call = await understand(self.core, session, body, "messages", _read_chat)
        if call.stream:
            raise bad("a socket does not stream; use the chat route", "stream", "unsupported")
        stop = call.sampling.stop
        options = CallOptions(
            call.sampling,
            call.tools,
            call.tools_key,
            shown=lambda message, turn: openai_chat.shown(message, turn, stop, processor),
            size=body.size,
        )
        answer = await session.generate(call.messages, options)
        told = partial(openai_chat.completion, f"chatcmpl-{session.id}", call, answer, processor)
        return told() if len(answer.turn.response_ids) <= LONG_ANSWER else await session.work.call(0, told)


def _read_chat(
    body: Any, base: SamplingParams, media: Mapping[MediaKey, MediaRef], session: PlayedSession
) -> openai_chat.ChatCall:
    return openai_chat.read_chat(body, base, media, session.fixed)
