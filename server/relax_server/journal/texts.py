"""What was said in an episode, as one text that can be searched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relax_sdk.trajectory import Trajectory

MOST_CHARACTERS = 16_384
"""Characters of an episode that can be searched; what comes later is left out."""


def spoken(trajectory: Trajectory) -> str:
    """The texts of an episode's messages, its tool calls and its error, one a line, the first `MOST_CHARACTERS` of them."""
    lines, length = [], 0
    for line in _lines(trajectory):
        lines.append(line)
        length += len(line) + 1
        if length > MOST_CHARACTERS:
            break
    return "\n".join(lines)[:MOST_CHARACTERS]


def _lines(trajectory: Trajectory) -> Iterator[str]:
    for message in trajectory.messages:
        content = message.get("content")
        if isinstance(content, str) and content:
            yield content
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "text" and part.get("text"):
                yield str(part["text"])
        for call in message.get("tool_calls") or ():
            function: Any = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                yield f"{function.get('name')}({function.get('arguments')})"
    if trajectory.error:
        yield trajectory.error
