"""Tool calls as models write them between `<tool_call>` tags: JSON (Hermes, Qwen) or a Python call."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from relax_sdk.errors import EnvError
from relax_sdk.messages import ControlToken, ToolCall

OPEN = "<tool_call>"
_BLOCK = re.compile(r"(<tool_call>)(.*?)(</tool_call>|$)", re.DOTALL)


class ControlText(str):
    """A piece of a response that a control token stands for."""


def split_tool_calls(
    pieces: Sequence[str], tools: Sequence[Mapping[str, Any]] = (), prefix: str = "call"
) -> tuple[str, list[ToolCall], list[ControlToken]]:
    """Take tool calls and control tokens out of a response.

    The tags of a call may be text or control tokens; inside a call, as outside, only text counts.

    Args:
        pieces: the response in order; pieces that are `ControlText` are control tokens.
        tools: OpenAI schemas; they name the positional arguments of calls in Python form.
        prefix: of the calls' ids, which are `<prefix>_<number>`.

    Returns:
        The text outside the tags; the calls, of which one that cannot be read carries `error`; the control tokens that are no
        tag of a call.
    """
    whole = "".join(pieces)
    blocks = list(_BLOCK.finditer(whole)) if OPEN in whole else []
    tags = {match.span(group) for match in blocks for group in (1, 3)}
    text, inside, control, start = "", [""] * len(blocks), [], 0
    for piece in pieces:
        end = start + len(piece)
        if isinstance(piece, ControlText):
            if (start, end) not in tags:
                control.append(ControlToken(str(piece), len(text)))
        else:
            at = start
            for i, block in enumerate(blocks):
                text += whole[at : min(max(block.start(), at), end)]
                low, high = max(block.start(2), start), min(block.end(2), end)
                inside[i] += whole[low:high] if low < high else ""
                at = max(at, min(block.end(), end))
            text += whole[at:end]
        start = end
    return text, [_read(block.strip(), tools, f"{prefix}_{i}") for i, block in enumerate(inside)], control


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
        arguments = {name: _literal(value) for name, value in zip(names, call.args, strict=False)}
        arguments |= {k.arg: _literal(k.value) for k in call.keywords if k.arg}
        return ToolCall(id, call.func.id, _json(arguments))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, EnvError) as error:
        return ToolCall(id, "", {}, error=f"the tool call {block[:80]!r} cannot be read ({error})")


def _literal(node: ast.expr) -> Any:
    """The value of a literal. Python's own error names an address in memory, another one in each replay."""
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise ValueError(f"{ast.unparse(node)[:40]!r} is no literal: write texts in quotes") from error


def _json(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments as they are after a way through JSON; Python's literals can be more: complex numbers, bytes, sets, NaN."""
    return json.loads(json.dumps(arguments, allow_nan=False))


def _parameters(name: str, tools: Sequence[Mapping[str, Any]]) -> list[str]:
    for tool in tools:
        if tool["function"]["name"] == name:
            return list(tool["function"]["parameters"].get("properties", {}))
    return []
