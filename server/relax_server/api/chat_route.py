"""`POST …/openai/v1/chat/completions`: every model call comes this way, so it is a plain Starlette route."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from relax_sdk.errors import RelaxError
from relax_sdk.media import MediaRef
from relax_server.api import openai_chat
from relax_server.api.auth import bearer, session_of
from relax_server.api.core import ServiceCore
from relax_server.api.errors import ApiError, as_api_error
from relax_server.api.openai_chat import ChatCall
from relax_server.api.sessions import ExternalSession, SessionHub
from relax_server.api.text_stream import TextStream
from relax_server.api.wire import error_response, json_response, media_names, read_json
from relax_server.engines.base import Generation
from relax_server.rollout.calls import Answer

LARGE = 64 << 10
"""Bytes of a body that is read in a thread: it holds media, whose bytes are hashed."""
PARSE_LIMIT = 60.0


class ChatRoute:
    """Model calls of sessions, in the OpenAI form.

    Args:
        core: of the service.
        hub: its sessions.
    """

    def __init__(self, core: ServiceCore, hub: SessionHub) -> None:
        self.core, self.hub = core, hub
        self._numbers = itertools.count()

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        try:
            session = await self.session(request)
            body, size, named = await read_json(request, self.core.config.max_body)
            media = await self.known(media_names(body.get("messages")) if isinstance(body, dict) and named else set())
            base, fixed = session.episode.task.sampling, session.opening.train
            if size > LARGE:
                threads = self.core.media_threads
                call = await threads.call(openai_chat.read_chat, body, base, media, fixed, limit=PARSE_LIMIT)
            else:
                call = openai_chat.read_chat(body, base, media, fixed)
            id = f"chatcmpl-{session.id}-{next(self._numbers)}"
            if call.stream:
                return await self.stream(session, call, id)
            answer = await self.ask(session, call)
            return json_response(openai_chat.completion(id, call, answer, self.core.processor))
        except RelaxError as error:
            return error_response(as_api_error(error))

    async def session(self, request: Request) -> ExternalSession:
        """The session in the path, or else the one that the key belongs to.

        Raises:
            ApiError: there is none.
        """
        id = request.path_params.get("id")
        if id is not None:
            return await session_of(request, self.core, self.hub, id)
        session = self.hub.by_secret(bearer(request))
        if session is None:
            raise ApiError(401, "the key of a session is wanted here; open one with POST /v1/sessions", "invalid_api_key")
        return session

    async def known(self, names: set[str]) -> dict[str, MediaRef]:
        """References of stored media; unknown ones are left out, and their message is refused later."""
        found = {name: await self.core.media_ref(name) for name in names}
        return {name: ref for name, ref in found.items() if ref is not None}

    async def ask(self, session: ExternalSession, call: ChatCall, on_partial: Any = None) -> Answer:
        """One model call, its answer as the client will see it."""
        processor, stop = self.core.processor, call.sampling.stop
        return await session.generate(
            call.messages,
            call.sampling,
            call.tools,
            call.tools_key,
            on_partial,
            lambda message, turn: openai_chat.shown(message, turn, stop, processor),
        )

    async def stream(self, session: ExternalSession, call: ChatCall, id: str) -> Response:
        """A streamed answer: every token is sent when it is there.

        An error before the first token is answered as such; one after it ends the stream with an error in it.
        """
        partials: asyncio.Queue[Generation | None] = asyncio.Queue()
        asking = asyncio.get_running_loop().create_task(self.ask(session, call, partials.put_nowait))
        asking.add_done_callback(lambda _: partials.put_nowait(None))
        try:
            first = await partials.get()
            if first is None and asking.exception() is not None:
                await asking
        except BaseException:
            asking.cancel()
            raise
        pieces = self.pieces(call, id, first, partials, asking)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(pieces, media_type="text/event-stream", headers=headers)

    async def pieces(
        self,
        call: ChatCall,
        id: str,
        partial: Generation | None,
        partials: asyncio.Queue[Generation | None],
        asking: asyncio.Task[Answer],
    ) -> AsyncIterator[bytes]:
        """The chunks of a streamed answer; the generation is aborted when the client goes away."""
        text = TextStream(self.core.processor, call.sampling.stop)
        told = 0
        try:
            yield _event(openai_chat.chunk(id, call.model, {"role": "assistant", "content": ""}))
            while partial is not None:
                while not partials.empty():  # only the newest state matters
                    later = partials.get_nowait()
                    if later is None:
                        partials.put_nowait(None)
                        break
                    partial = later
                new = text.feed(partial.response_ids)
                if new:
                    yield _event(openai_chat.chunk(id, call.model, {"content": new}))
                partial = await partials.get()
            answer = await asking
            message, turn = answer.message, answer.turn
            rest = text.finish(message.text)
            if rest:
                yield _event(openai_chat.chunk(id, call.model, {"content": rest}))
            if message.tool_calls:
                yield _event(openai_chat.chunk(id, call.model, {"tool_calls": openai_chat.tool_deltas(message)}))
            more = {"logprobs": openai_chat.logprobs(turn, told, self.core.processor)} if call.logprobs else {}
            last = openai_chat.chunk(id, call.model, {}, openai_chat.finish_reason(message), **more)
            yield _event(last | openai_chat.extra(turn))
            if call.usage:
                counts = {"choices": [], "usage": openai_chat.usage(turn)}
                yield _event(openai_chat.head(id, "chat.completion.chunk", call.model) | counts)
            yield b"data: [DONE]\n\n"
        except RelaxError as error:
            yield _event(as_api_error(error).body)
        finally:
            asking.cancel()


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
