"""`POST …/openai/v1/chat/completions`: every model call comes this way, so it is a plain Starlette route."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from relax_sdk.config import SamplingParams
from relax_sdk.errors import RelaxError
from relax_sdk.media import MediaKey, MediaRef
from relax_server.gateway import openai_chat
from relax_server.gateway.errors import as_api_error
from relax_server.gateway.model_route import GrowingAnswer, ModelRoute, data
from relax_server.gateway.openai_chat import ChatCall
from relax_server.gateway.played import PlayedSession
from relax_server.gateway.wire import json_response
from relax_server.rollout.calls import Answer


class ChatRoute(ModelRoute):
    """Chat completions."""

    prefix, field = "chatcmpl-", "messages"

    def read(self, body: Any, base: SamplingParams, media: dict[MediaKey, MediaRef], session: PlayedSession) -> ChatCall:
        return openai_chat.read_chat(body, base, media, session.fixed)

    def whole(self, id: str, call: ChatCall, answer: Answer, session: PlayedSession) -> Response:
        return json_response(openai_chat.completion(id, call, answer, self.around.processor))

    async def events(self, id: str, call: ChatCall, answer: GrowingAnswer, session: PlayedSession) -> AsyncIterator[bytes]:
        model = call.model
        try:
            yield data(openai_chat.chunk(id, model, {"role": "assistant", "content": ""}))
            async for piece in answer.pieces():
                yield data(openai_chat.chunk(id, model, {"content": piece}))
            whole, rest = await answer.end()
            message, turn = whole.message, whole.turn
            if rest:
                yield data(openai_chat.chunk(id, model, {"content": rest}))
            if message.tool_calls:
                yield data(openai_chat.chunk(id, model, {"tool_calls": openai_chat.tool_deltas(message)}))
            more = {}
            if call.logprobs:
                more["logprobs"] = await session.work.call(0, openai_chat.logprobs, turn, self.around.processor)
            last = openai_chat.chunk(id, model, openai_chat.control_delta(message), openai_chat.finish_reason(message), **more)
            yield data(last | openai_chat.extra(turn))
            if call.usage:
                counts = {"choices": [], "usage": openai_chat.usage(turn)}
                yield data(openai_chat.head(id, "chat.completion.chunk", model) | counts)
            yield b"data: [DONE]\n\n"
        except RelaxError as error:
            yield data(as_api_error(error).body)
