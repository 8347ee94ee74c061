"""Tool calls as models write them, well and badly."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relax_server.models.tool_calls import split_tool_calls

TOOLS = [{"type": "function", "function": {"name": "guess", "parameters": {"properties": {"number": {"type": "integer"}}}}}]


@pytest.mark.parametrize("block", ['{"name": "guess", "arguments": {"number": 3}}', "guess(3)", "guess(number=3)"])
def test_json_and_python_calls_are_read(block: str):
    text, (call,), _ = split_tool_calls([f"so <tool_call>{block}</tool_call>"], TOOLS)
    assert (text, call.name, call.arguments, call.error) == ("so ", "guess", {"number": 3}, None)


@pytest.mark.parametrize(
    "value", ["1j", "b'x'", "{1, 2}", "1e999", "{[]: 1}", "...", "-1e999", "{b'x': 1}", "9" * 5000, "[" * 500]
)
def test_a_value_that_json_does_not_know_is_the_models_mistake(value: str):
    """Noise from a random model once gave a complex number, which failed the episode when the message was written down."""
    _, (call,), _ = split_tool_calls([f"<tool_call>guess({value})</tool_call>"], TOOLS)
    assert call.error is not None and "cannot be read" in call.error


def test_what_is_told_of_a_call_is_the_same_whenever_it_is_read():
    """Python names the address of what it cannot read; a replayed episode was told another text than the recorded one."""
    told = {split_tool_calls(["<tool_call>guess(H)</tool_call>"], TOOLS)[1][0].error for _ in range(3)}
    assert told == {"the tool call 'guess(H)' cannot be read ('H' is no literal: write texts in quotes)"}


@given(st.text(max_size=60))
def test_whatever_a_model_writes_can_be_written_down(text: str):
    for block in (text, f"guess({text})", f'{{"name": "guess", "arguments": {text}}}'):
        for call in split_tool_calls([f"<tool_call>{block}</tool_call>"], TOOLS)[1]:
            json.dumps(call.arguments, allow_nan=False)
