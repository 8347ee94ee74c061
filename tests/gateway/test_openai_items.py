"""Messages, and the items of the Responses API that stand for them."""

from __future__ import annotations

import json

import pytest
from relax_server.gateway.errors import ApiError
from relax_server.gateway.openai_chat import control_delta, read_message, shown
from relax_server.gateway.openai_responses import output, read_items
from relax_server.models.processor import Processor

from relax_sdk.messages import AssistantMessage, ControlToken, Text, ToolCall
from relax_sdk.trajectory import Turn


def test_calls_of_one_answer_become_one_message() -> None:
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me see"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"n": 1}'},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
    ]
    user, said, result = read_items(items, {})
    assert said.text == "let me see" and [(c.id, c.name, c.arguments) for c in said.tool_calls] == [
        ("a", "f", {"n": 1}),
        ("b", "g", {}),
    ]
    assert result.role == "tool" and result.tool_call_id == "a" and user.text == "x"


def test_tool_calls_are_items_of_their_own() -> None:
    message = AssistantMessage(content=(Text("hm"),), tool_calls=(ToolCall("c1", "guess", {"number": 2}),))
    text, call = output("resp_1", message)
    assert text["content"][0]["text"] == "hm"
    assert (call["type"], call["call_id"], call["name"], json.loads(call["arguments"])) == (
        "function_call",
        "c1",
        "guess",
        {"number": 2},
    )
    assert [item["type"] for item in output("r", AssistantMessage())] == ["message"]


def test_a_call_that_cannot_be_read_is_shown_as_the_text_it_was(processor: Processor) -> None:
    text = "<tool_call>nonsense(</tool_call>"
    ids = processor.tokenizer.encode(text, add_special_tokens=False)
    turn = Turn([1], ids, [0.0] * len(ids))
    message = processor.parse(ids, "stop", [])
    assert message.tool_calls and message.tool_calls[0].error
    answer = shown(message, turn, (), processor)
    assert (answer.text, answer.tool_calls) == ("nonsense(", ()), "its tags are control tokens of this model, and no text"
    assert answer.control_tokens == (ControlToken("<tool_call>", 0), ControlToken("</tool_call>", 9))


def test_control_tokens_are_beside_the_text_in_every_form_of_an_answer() -> None:
    message = AssistantMessage(content=(Text("ab"),), control_tokens=(ControlToken("</think>", 1),))
    field = [{"token": "</think>", "at": 1}]
    assert message.to_openai() == {"role": "assistant", "content": "ab", "control_tokens": field}
    assert control_delta(message) == {"control_tokens": field} and control_delta(AssistantMessage()) == {}
    (item,) = output("r", message)
    assert item["content"][0]["text"] == "ab" and item["control_tokens"] == field
    assert read_items([item], {}) == [message]


@pytest.mark.parametrize("tokens", [3, "x", [3], [{"token": "x"}], [{"token": 3, "at": 0}], [{"token": "x", "at": -1}]])
def test_control_tokens_that_cannot_be_read_are_refused(tokens: object) -> None:
    with pytest.raises(ApiError, match="control"):
        read_message({"role": "assistant", "content": "a", "control_tokens": tokens}, 0, {})
