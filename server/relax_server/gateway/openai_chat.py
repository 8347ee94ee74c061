"""OpenAI chat completions: their requests as messages and sampling, recorded turns as their answers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from relax_sdk.config import SamplingParams
from relax_sdk.errors import ConfigError, RelaxError
from relax_sdk.media import MediaKey, MediaRef
from relax_sdk.messages import AssistantMessage, Message, Text
from relax_sdk.storable import check_storable
from relax_sdk.trajectory import Turn
from relax_server.gateway.errors import bad
from relax_server.json_form import json_text
from relax_server.rollout.calls import Answer

if TYPE_CHECKING:
    from relax_server.models.processor import Processor

REFUSED = {
    "n": (None, 1),
    "response_format": (None, {"type": "text"}),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "top_logprobs": (None, 0),
    "functions": (None,),
    "function_call": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}
"""Fields that change what is generated and are not supported; with these values they change nothing."""
MOST_STOPS = 16


@dataclass(frozen=True)
class ModelCall:
    """A request for one answer of the model, understood."""

    messages: list[Message]
    sampling: SamplingParams
    tools: list[dict[str, Any]] | None
    """None: the request names none, so the environment's are offered."""
    tools_key: str
    stream: bool
    model: str


@dataclass(frozen=True)
class ChatCall(ModelCall):
    """A chat request."""

    usage: bool
    """Whether a stream ends with a chunk of token counts."""
    logprobs: bool


def read_chat(body: Any, base: SamplingParams, media: Mapping[MediaKey, MediaRef], fixed: bool) -> ChatCall:
    """Understand the body of a chat request.

    Args:
        body: parsed JSON.
        base: sampling where the request says nothing.
        media: known items by kind and sha256, that messages may name as `relax-media:<sha256>`.
        fixed: whether temperature, top_p and top_k are those of `base` whatever the request says, as in training.

    Raises:
        ApiError: a field is missing, of the wrong type or not supported.
        EnvError, MediaError: a message cannot be read.
    """
    if not isinstance(body, dict):
        raise bad("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages must be a list of at least one message", "messages")
    for name, fine in REFUSED.items():
        if body.get(name) not in fine:
            raise bad(f"{name} = {json_text(body[name])[:80]} is not supported; leave it out", name, "unsupported")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise bad(f"tool_choice = {json_text(choice)[:80]}: only auto and none are supported", "tool_choice", "unsupported")
    tools = read_tools(body.get("tools")) if choice != "none" else []
    return ChatCall(
        messages=[read_message(m, i, media) for i, m in enumerate(messages)],
        sampling=read_sampling(body, base, fixed, ("max_completion_tokens", "max_tokens")),
        tools=tools,
        tools_key=json.dumps(tools, sort_keys=True) if tools is not None else "",
        stream=read_flag(body, "stream"),
        usage=isinstance(body.get("stream_options"), dict) and bool(body["stream_options"].get("include_usage")),
        logprobs=read_flag(body, "logprobs"),
        model=str(body.get("model") or ""),
    )


def read_message(raw: Any, index: int, media: Mapping[MediaKey, MediaRef]) -> Message:
    """One message; `developer` is another word for `system`.

    Raises:
        ApiError: it cannot be read; it is named by its number.
    """
    if not isinstance(raw, dict):
        raise bad(f"messages[{index}] must be an object", f"messages[{index}]")
    if raw.get("role") == "developer":
        raw = {**raw, "role": "system"}
    try:
        return Message.from_openai(raw, media, inline=False)
    except RelaxError as error:
        raise bad(f"messages[{index}]: {error}", f"messages[{index}]", "invalid_message") from error
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        what = f"messages[{index}] is malformed ({type(error).__name__}: {error})"
        raise bad(what, f"messages[{index}]", "invalid_message") from error


def read_tools(raw: Any) -> list[dict[str, Any]] | None:
    """The tools of a request.

    Raises:
        ApiError: not a list of functions.
        UnstorableError: nested too deeply.
    """
    if raw is None:
        return None
    if not isinstance(raw, list):
        raise bad("tools must be a list", "tools")
    check_storable(raw, "tools")
    for i, tool in enumerate(raw):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(f'tools[{i}] must be {{"type": "function", "function": {{"name": …}}}}', f"tools[{i}]", "unsupported")
        if not isinstance(function.get("parameters", {}), dict):
            raise bad(f"tools[{i}].function.parameters must be an object", f"tools[{i}]")
    return [{**tool, "function": {"parameters": {"type": "object", "properties": {}}, **tool["function"]}} for tool in raw]


_remembered = lru_cache(maxsize=256, typed=True)(replace)


def _changed(base: SamplingParams, **numbers: Any) -> SamplingParams:
    """`replace`, which checks all values again, once for calls that ask for the same."""
    try:
        return _remembered(base, **numbers)
    except TypeError:  # such as a list, which cannot be looked up; the check says what is wrong with it
        return replace(base, **numbers)


def read_sampling(body: Mapping[str, Any], base: SamplingParams, fixed: bool, limits: Sequence[str]) -> SamplingParams:
    """Sampling of one call.

    Args:
        body: the request.
        base: where it says nothing.
        fixed: see `read_chat`.
        limits: names of the field that limits new tokens, the first that is given counts.

    Raises:
        ApiError: a value of the wrong type or outside its range.
    """
    numbers: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    limit = next((body[name] for name in limits if body.get(name) is not None), None)
    if limit is not None:
        if type(limit) is not int or limit < 1:
            raise bad(f"{limits[0]} = {limit!r}; allowed: an integer of 1 or more", limits[0])
        numbers["max_new_tokens"] = min(limit, base.max_new_tokens) if fixed else limit
    if not fixed:
        for name in ("temperature", "top_p", "top_k"):
            if body.get(name) is not None:
                numbers[name] = float(body[name]) if type(body[name]) is int and name != "top_k" else body[name]
        if body.get("seed") is not None:
            rest["sampling_seed"] = body["seed"]
    stop = body.get("stop")
    if stop is not None:
        rest["stop"] = [stop] if isinstance(stop, str) else stop
        if isinstance(rest["stop"], list) and len(rest["stop"]) > MOST_STOPS:
            raise bad(f"{len(rest['stop'])} stop texts; allowed: up to {MOST_STOPS}", "stop")
    try:
        return replace(_changed(base, **numbers), **rest) if rest else _changed(base, **numbers)
    except (ConfigError, TypeError, ValueError, OverflowError) as error:
        raise bad(str(error).replace("SamplingParams.", "").replace("SamplingParams ", "")) from error


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """A field that is true, false or left out.

    Raises:
        ApiError: something else.
    """
    value = body.get(name)
    if value is not None and type(value) is not bool:
        raise bad(f"{name} = {value!r}; allowed: true or false", name)
    return bool(value)


# -------------------------------------------------------------------------------------------------------------- answers


def shown(message: AssistantMessage, turn: Turn, stop: Sequence[str], processor: Processor) -> AssistantMessage:
    """An answer as a client is given it: without the stop text, tool calls that cannot be read as plain text, and ids of
    tool calls that are unique in the conversation. Control tokens stay beside the text, never in it.

    Args:
        message: as the model wrote it.
        turn: as recorded.
        stop: texts that ended it.
        processor: of the model.
    """
    if any(call.error for call in message.tool_calls):
        text, control = processor.answers.plain(turn.response_ids)
        message = replace(message, content=(Text(text),) if text else (), tool_calls=(), control_tokens=control)
    if stop and message.content:
        text = message.text
        at = min((at for s in stop if (at := text.find(s)) >= 0), default=-1)
        if at >= 0:
            control = tuple(token for token in message.control_tokens if token.at <= at)
            message = replace(message, content=(Text(text[:at]),) if at else (), control_tokens=control)
    if message.tool_calls:
        start = len(turn.prompt_ids)
        message = replace(message, tool_calls=tuple(replace(c, id=f"{c.id}_{start}") for c in message.tool_calls))
    return message


def finish_reason(message: AssistantMessage) -> str:
    """OpenAI's word for why a response ended."""
    return "tool_calls" if message.tool_calls and message.finish_reason == "stop" else message.finish_reason


def head(id: str, kind: str, model: str) -> dict[str, Any]:
    """What every answer and chunk begins with."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}


def completion(id: str, call: ChatCall, answer: Answer, processor: Processor) -> dict[str, Any]:
    """The whole answer to a chat request."""
    wire = answer.message.to_openai()
    wire["content"] = wire["content"] or None if answer.message.tool_calls else wire["content"]
    choice: dict[str, Any] = {"index": 0, "message": wire, "finish_reason": finish_reason(answer.message)}
    choice["logprobs"] = logprobs(answer.turn, processor) if call.logprobs else None
    return {**head(id, "chat.completion", call.model), "choices": [choice], "usage": usage(answer.turn), **extra(answer.turn)}


def chunk(id: str, model: str, delta: dict[str, Any], reason: str | None = None, **more: Any) -> dict[str, Any]:
    """One piece of a streamed answer."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason, **more}
    return {**head(id, "chat.completion.chunk", model), "choices": [choice]}


def control_delta(message: AssistantMessage) -> dict[str, Any]:
    """The control tokens of a streamed answer, for its last piece."""
    return {key: value for key, value in message.to_openai().items() if key == "control_tokens"}


def tool_deltas(message: AssistantMessage) -> list[dict[str, Any]]:
    """The tool calls of a streamed answer, whole."""
    return [{"index": i, **call} for i, call in enumerate(message.to_openai().get("tool_calls", []))]


def usage(turn: Turn) -> dict[str, Any]:
    """Token counts."""
    return {
        "prompt_tokens": len(turn.prompt_ids),
        "completion_tokens": len(turn.response_ids),
        "total_tokens": len(turn.prompt_ids) + len(turn.response_ids),
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
    }


def extra(turn: Turn) -> dict[str, Any]:
    """What OpenAI does not have: the weight versions that produced the tokens."""
    return {"relax": {"weight_versions": [[s.version, s.start, s.end] for s in turn.weight_versions]}}


def logprobs(turn: Turn, processor: Processor) -> dict[str, Any]:
    """Logprobs of all tokens of an answer."""
    rows = []
    for id, value in zip(turn.response_ids, turn.response_logprobs, strict=True):
        text = processor.decode([id])
        rows.append({"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": rows, "refusal": None}
