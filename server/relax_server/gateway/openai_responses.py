"""OpenAI's Responses API: its items as messages, recorded turns as its output."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from relax_sdk.config import SamplingParams
from relax_sdk.errors import RelaxError
from relax_sdk.media import MediaKey, MediaRef
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.trajectory import Turn
from relax_server.gateway.errors import as_api_error, bad
from relax_server.gateway.model_route import GrowingAnswer, ModelRoute, data
from relax_server.gateway.openai_chat import ModelCall, control_delta, extra, read_flag, read_message, read_sampling, read_tools
from relax_server.gateway.played import PlayedSession
from relax_server.gateway.wire import json_response
from relax_server.json_form import json_text
from relax_server.rollout.calls import Answer

REFUSED = {
    "text": (None, {"format": {"type": "text"}}, {}),
    "background": (None, False),
    "prompt": (None,),
    "top_logprobs": (None, 0),
}
"""Fields that change what is generated and are not supported; with these values they change nothing."""
PARTS = {"input_text": "text", "output_text": "text", "input_image": "image_url", "input_video": "video_url"}
"""Kinds of content, and what chat messages call them; `input_video` is ours."""


@dataclass(frozen=True)
class ResponseCall(ModelCall):
    """A request for a response."""

    request: Mapping[str, Any]
    """The body, for what is echoed."""


class ResponsesRoute(ModelRoute):
    """`POST …/openai/v1/responses`."""

    prefix, field = "resp_", "input"

    def read(self, body: Any, base: SamplingParams, media: dict[MediaKey, MediaRef], session: PlayedSession) -> ResponseCall:
        if not isinstance(body, dict):
            raise bad("the body must be a JSON object")
        for name, fine in REFUSED.items():
            if body.get(name) not in fine:
                raise bad(f"{name} = {json_text(body[name])[:80]} is not supported; leave it out", name, "unsupported")
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            raise bad(f"tool_choice = {json_text(choice)[:80]}: only auto and none are supported", "tool_choice", "unsupported")
        before: list[Message] = []
        previous = body.get("previous_response_id")
        if previous is not None:
            if not isinstance(previous, str) or previous not in session.responses:
                raise bad(f"previous_response_id = {previous!r}: no such response in this session", "previous_response_id")
            before = session.responses[previous]
        messages = [*before, *read_items(body.get("input"), media)]
        if body.get("instructions") is not None:
            messages = [read_message({"role": "system", "content": body["instructions"]}, 0, {}), *_without_system(messages)]
        tools = [] if choice == "none" else read_tools(_chat_tools(body.get("tools")))
        return ResponseCall(
            messages=messages,
            sampling=read_sampling(body, base, session.fixed, ("max_output_tokens",)),
            tools=tools,
            tools_key=json.dumps(tools, sort_keys=True) if tools is not None else "",
            stream=read_flag(body, "stream"),
            model=str(body.get("model") or ""),
            request=body,
        )

    def whole(self, id: str, call: ResponseCall, answer: Answer, session: PlayedSession) -> Response:
        session.responses[id] = [*answer.asked, answer.message]
        return json_response(response(id, call, answer.message, answer.turn))

    async def events(self, id: str, call: ResponseCall, answer: GrowingAnswer, session: PlayedSession) -> AsyncIterator[bytes]:
        number = -1

        def event(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            return data({"type": kind, "sequence_number": number, **fields}, kind)

        place = {"item_id": f"msg_{id}", "output_index": 0, "content_index": 0}
        text = ""
        try:
            yield event("response.created", response=response(id, call, None, None))
            yield event("response.in_progress", response=response(id, call, None, None))
            async for piece in answer.pieces():
                if not text:
                    for begun in _begin_text(event, id):
                        yield begun
                text += piece
                yield event("response.output_text.delta", **place, delta=piece, logprobs=[])
            whole, rest = await answer.end()
            if rest:
                if not text:
                    for begun in _begin_text(event, id):
                        yield begun
                text += rest
                yield event("response.output_text.delta", **place, delta=rest, logprobs=[])
            session.responses[id] = [*whole.asked, whole.message]
            items = output(id, whole.message)
            for index, item in enumerate(items):
                if item["type"] == "message":
                    if not text:
                        for begun in _begin_text(event, id):
                            yield begun
                    yield event("response.output_text.done", **place, text=text, logprobs=[])
                    yield event("response.content_part.done", **place, part=item["content"][0])
                else:
                    started = item | {"arguments": "", "status": "in_progress"}
                    yield event("response.output_item.added", output_index=index, item=started)
                    where = {"item_id": item["id"], "output_index": index}
                    yield event("response.function_call_arguments.delta", **where, delta=item["arguments"])
                    yield event(
                        "response.function_call_arguments.done", **where, arguments=item["arguments"], name=item["name"]
                    )
                yield event("response.output_item.done", output_index=index, item=item)
            last = response(id, call, whole.message, whole.turn)
            yield event(f"response.{last['status']}", response=last)
        except RelaxError as error:
            told = as_api_error(error)
            yield event("error", code=told.code, message=str(told), param=told.param)


def read_items(raw: Any, media: Mapping[MediaKey, MediaRef]) -> list[Message]:
    """The messages that an `input` stands for; calls of one answer become one message.

    Raises:
        ApiError: an item cannot be read.
    """
    if isinstance(raw, str):
        raw = [{"role": "user", "content": raw}]
    if not isinstance(raw, list) or not raw:
        raise bad("input must be a text or a list of at least one item", "input")
    rows: list[dict[str, Any]] = []
    for i, item in enumerate(raw):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            row = {"role": item.get("role"), "content": _content(item.get("content"), i)}
            rows.append(row | {"control_tokens": item.get("control_tokens")})
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
            if not rows or rows[-1]["role"] != "assistant":
                rows.append({"role": "assistant", "content": None})
            rows[-1].setdefault("tool_calls", []).append(call | {"type": "function"})
        elif kind == "function_call_output":
            content = _content(item.get("output"), i)
            rows.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind != "reasoning":
            raise bad(f"input[{i}]: items of type {kind!r} are not supported", f"input[{i}]", "unsupported")
    return [read_message(row, i, media) for i, row in enumerate(rows)]


def _content(raw: Any, index: int) -> Any:
    """Content parts in the words of chat messages."""
    if not isinstance(raw, list):
        return raw
    parts: list[Any] = []
    for part in raw:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("input_text", "output_text"):
            parts.append({"type": "text", "text": part.get("text")})
        elif kind == "input_audio":
            parts.append(part)
        elif kind in PARTS:
            name = PARTS[kind]
            parts.append({"type": name, name: {"url": part.get(name)}})
        else:
            raise bad(f"input[{index}]: content of type {kind!r} is not supported", f"input[{index}]", "unsupported")
    return parts


def _without_system(messages: list[Message]) -> list[Message]:
    """New instructions take the place of those of an earlier response."""
    return messages[1:] if messages and messages[0].role == "system" else messages


def _chat_tools(raw: Any) -> Any:
    """Tools in the form of chat requests."""
    if not isinstance(raw, list):
        return raw
    names = ("name", "description", "parameters", "strict")
    return [
        {"type": tool.get("type"), "function": {k: tool[k] for k in names if tool.get(k) is not None}}
        if isinstance(tool, dict) and "function" not in tool
        else tool
        for tool in raw
    ]


# -------------------------------------------------------------------------------------------------------------- answers


def output(id: str, message: AssistantMessage) -> list[dict[str, Any]]:
    """The items of an answer: its text, if any or if there is nothing else, and its tool calls."""
    status = "completed" if message.finish_reason == "stop" else "incomplete"
    items: list[dict[str, Any]] = []
    if message.text or message.control_tokens or not message.tool_calls:
        part = {"type": "output_text", "text": message.text, "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{id}", "role": "assistant", "status": status, "content": [part]}
        items.append(item | control_delta(message))
    for call in message.tool_calls:
        arguments = json.dumps(call.arguments)
        item = {"type": "function_call", "id": f"fc_{call.id}_{id}", "call_id": call.id, "name": call.name}
        items.append(item | {"arguments": arguments, "status": status})
    return items


def response(id: str, call: ResponseCall, message: AssistantMessage | None, turn: Turn | None) -> dict[str, Any]:
    """A response object; without a message, one that is in progress."""
    request = call.request
    cut = message is not None and message.finish_reason == "length"
    body: dict[str, Any] = {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress" if message is None else "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": request.get("instructions"),
        "max_output_tokens": request.get("max_output_tokens"),
        "metadata": request.get("metadata") or {},
        "model": call.model,
        "output": output(id, message) if message is not None else [],
        "parallel_tool_calls": True,
        "previous_response_id": request.get("previous_response_id"),
        "temperature": call.sampling.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "top_p": call.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }
    if turn is not None:
        sizes = len(turn.prompt_ids), len(turn.response_ids)
        body["usage"] = {
            "input_tokens": sizes[0],
            "input_tokens_details": {"cached_tokens": turn.cached_tokens},
            "output_tokens": sizes[1],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": sum(sizes),
        }
        body |= extra(turn)
    return body


def _begin_text(event: Any, id: str) -> list[bytes]:
    """The events before the first text."""
    item = {"type": "message", "id": f"msg_{id}", "role": "assistant", "status": "in_progress", "content": []}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return [
        event("response.output_item.added", output_index=0, item=item),
        event("response.content_part.added", item_id=item["id"], output_index=0, content_index=0, part=part),
    ]
