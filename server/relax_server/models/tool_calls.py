"""Tool calls as models write them between `<tool_call>` tags: JSON (Hermes, Qwen) or a Python call."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from relax_sdk.messages import ToolCall

_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


def split_tool_calls(text: str, tools: Sequence[Mapping[str, Any]] = (), prefix: str = "call") -> tuple[str, list[ToolCall]]:
    """Take the tool calls out of a response.

    Args:
        text: the response, tags included.
        tools: OpenAI schemas; they name the positional arguments of calls in Python form.
        prefix: of the calls' ids, which are `<prefix>_<number>`.

    Returns:
        The text outside the tags, and the calls; one that cannot be read carries `error`.
    """
    calls = [_read(block.strip(), tools, f"{prefix}_{i}") for i, block in enumerate(_BLOCK.findall(text))]
    return _BLOCK.sub("", text), calls


def _read(block: str, tools: Sequence[Mapping[str, Any]], id: str) -> ToolCall:
    try:
        if block.startswith("{"):
            raw = json.loads(block)
            arguments = raw.get("arguments", raw.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            if not isinstance(raw.get("name"), str) or not isinstance(arguments, dict):
                raise ValueError("a call needs a name and arguments")
            return ToolCall(id, raw["name"], _json(arguments))
        call = ast.parse(block, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("not a call")
        names = _parameters(call.func.id, tools)
        if len(call.args) > len(names):
            raise ValueError(f"{call.func.id} takes {len(names)} positional arguments")
        arguments = {name: ast.literal_eval(value) for name, value in zip(names, call.args, strict=False)}
        arguments |= {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
        return ToolCall(id, call.func.id, _json(arguments))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        return ToolCall(id, "", {}, error=f"the tool call {block[:80]!r} cannot be read ({error})")


def _json(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments as they are after a way through JSON; Python's literals can be more: complex numbers, bytes, sets, NaN."""
    return json.loads(json.dumps(arguments, allow_nan=False))


def _parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return list(tool["function"]["parameters"].get("properties", {}))
    return []
