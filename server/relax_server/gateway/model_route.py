"""What the OpenAI routes share: the session of a request, its media, one model call, and its answer while it grows."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from relax_sdk.config import SamplingParams
from relax_sdk.errors import RelaxError
from relax_sdk.media import MediaKey, MediaRef
from relax_sdk.messages import AssistantMessage
from relax_server.engines.base import Generation
from relax_server.gateway.errors import as_api_error
from relax_server.gateway.openai_chat import ModelCall, shown
from relax_server.gateway.played import PlayedSession, Surroundings
from relax_server.gateway.reading import parse, understand
from relax_server.gateway.text_stream import TextStream
from relax_server.gateway.wire import error_response, read_body
from relax_server.json_form import as_json
from relax_server.rollout.calls import Answer, CallOptions

LONG_ANSWER = 512
"""Tokens of an answer; longer ones are written in a thread."""
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class GrowingAnswer:
    """An answer that is told while it grows.

    Args:
        text: finds out what of it is settled.
        begin: starts the call, given somebody to tell of partial answers.
    """

    def __init__(self, text: TextStream, begin: Callable[[Callable[[Generation], None]], Any]) -> None:
        self._text = text
        self._partials: asyncio.Queue[Generation | None] = asyncio.Queue()
        self._asking: asyncio.Task[Answer] = asyncio.get_running_loop().create_task(begin(self._partials.put_nowait))
        self._asking.add_done_callback(lambda _: self._partials.put_nowait(None))
        self._first: Generation | None = None

    async def first(self) -> None:
        """Wait for the first token, or the end.

        Raises:
            RelaxError: the call failed before there was one.
        """
        try:
            self._first = await self._partials.get()
            if self._first is None and self._asking.exception() is not None:
                await self._asking
        except BaseException:
            self.cancel()
            raise

    async def pieces(self) -> AsyncIterator[str]:
        """Settled text, each piece once."""
        partial = self._first
        while partial is not None:
            while not self._partials.empty():  # only the newest state matters
                later = self._partials.get_nowait()
                if later is None:
                    self._partials.put_nowait(None)
                    break
                partial = later
            new = self._text.feed(partial.response_ids)
            if new:
                yield new
            partial = await self._partials.get()

    async def end(self) -> tuple[Answer, str]:
        """The whole answer, and the text of it that was not told yet.

        Raises:
            RelaxError: the call failed.
        """
        answer = await self._asking
        return answer, self._text.finish(answer.message.text)

    def cancel(self) -> None:
        """Nobody listens any more: the generation is aborted."""
        self._asking.cancel()


class ModelRoute(ABC):
    """One way of asking the model.

    Args:
        around: where the sessions live.
        find: the session that a request is for.
    """

    prefix: str
    """What the ids of answers begin with."""
    field: str
    """Name of the field of the body that holds the conversation."""

    def __init__(self, around: Surroundings, find: Callable[[Request], Awaitable[PlayedSession]]) -> None:
        self.around, self.find = around, find
        self._numbers = itertools.count()

    @abstractmethod
    def read(self, body: Any, base: SamplingParams, media: dict[MediaKey, MediaRef], session: PlayedSession) -> ModelCall:
        """Understand a request.

        Raises:
            RelaxError: it cannot be carried out.
        """

    @abstractmethod
    def whole(self, id: str, call: Any, answer: Answer, session: PlayedSession) -> Response:
        """The answer in one piece."""

    @abstractmethod
    def events(self, id: str, call: Any, answer: GrowingAnswer, session: PlayedSession) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        try:
            session = await self.find(request)
            session.require_open()
            body = await parse(await read_body(request, self.around.max_body), session.work)
            call, size = await understand(self.around, session, body, self.field, self.read), body.size
            del body  # it may be large, and the answer may take long
            id = f"{self.prefix}{session.id}-{next(self._numbers)}"
            if not call.stream:
                answer = await self.ask(session, call, size)
                if len(answer.turn.response_ids) <= LONG_ANSWER:
                    return self.whole(id, call, answer, session)
                return await session.work.call(0, self.whole, id, call, answer, session)
            text = TextStream(self.around.processor, call.sampling.stop)
            growing = GrowingAnswer(text, lambda on_partial: self.ask(session, call, size, on_partial))
            await growing.first()  # an error before the first token is answered as such
            return StreamingResponse(
                self.told(id, call, growing, session), headers=STREAM_HEADERS, media_type="text/event-stream"
            )
        except RelaxError as error:
            return error_response(as_api_error(error))

    async def told(self, id: str, call: ModelCall, answer: GrowingAnswer, session: PlayedSession) -> AsyncIterator[bytes]:
        """The events; when the client goes away the generation is aborted."""
        try:
            async for event in self.events(id, call, answer, session):
                yield event
        finally:
            answer.cancel()

    async def ask(
        self, session: PlayedSession, call: ModelCall, size: int, on_partial: Callable[[Generation], None] | None = None
    ) -> Answer:
        """One model call, its answer as the client will see it."""
        processor, stop = self.around.processor, call.sampling.stop

        def as_shown(message: AssistantMessage, turn: Any) -> AssistantMessage:
            return shown(message, turn, stop, processor)

        options = CallOptions(call.sampling, call.tools, call.tools_key, on_partial, as_shown, size)
        return await session.generate(call.messages, options)


def data(body: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n".encode() if event is not None else b""
    return name + b"data: " + as_json(body) + b"\n\n"
