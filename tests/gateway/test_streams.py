"""Streamed answers: their text holds no control token, and their end tells of them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from relax_server.engines.base import Generation
from relax_server.gateway.chat_route import ChatRoute
from relax_server.gateway.model_route import GrowingAnswer, ModelRoute
from relax_server.gateway.openai_chat import read_chat, shown
from relax_server.gateway.openai_responses import ResponsesRoute
from relax_server.gateway.text_stream import TextStream
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.rollout.calls import Answer

from relax_sdk.config import SamplingParams
from relax_sdk.trajectory import Turn

PROCESSOR = Processor.load(resolve_model("relax/tiny-omni"))
WRITTEN = "ab</tool_call>c</tool_call><|im_start|><|im_end|>"
CONTROL = [{"token": "</tool_call>", "at": 2}, {"token": "</tool_call>", "at": 3}, {"token": "<|im_start|>", "at": 3}]


def growing() -> GrowingAnswer:
    """An answer that is told token by token."""
    ids = PROCESSOR.tokenizer.encode(WRITTEN, add_special_tokens=False)
    turn = Turn([1], ids, [0.0] * len(ids))

    async def begin(on_partial: Any) -> Answer:
        for n in range(1, len(ids) + 1):
            on_partial(Generation([1], ids[:n], [0.0] * n, [], "stop"))
        return Answer(shown(PROCESSOR.parse(ids, "stop"), turn, (), PROCESSOR), turn, [])

    return GrowingAnswer(TextStream(PROCESSOR), begin)


async def told(route: type[ModelRoute], call: Any) -> list[dict[str, Any]]:
    """The bodies of all events."""
    around: Any = SimpleNamespace(processor=PROCESSOR)
    session: Any = SimpleNamespace(responses={}, fixed=False)
    made, answer = route(around, None), growing()  # type: ignore[arg-type]
    if route is ResponsesRoute:
        call = made.read({"input": "x", "stream": True}, SamplingParams(), {}, session)
    await answer.first()
    events = [line async for event in made.events("x", call, answer, session) for line in event.decode().splitlines()]
    bodies = [line.removeprefix("data: ") for line in events if line.startswith("data: ")]
    return [json.loads(body) for body in bodies if body != "[DONE]"]


async def test_a_chat_stream_tells_control_tokens_at_its_end_alone() -> None:
    call = read_chat({"messages": [{"role": "user", "content": "x"}], "stream": True}, SamplingParams(), {}, False)
    deltas = [chunk["choices"][0]["delta"] for chunk in await told(ChatRoute, call)]
    assert "".join(delta.get("content", "") for delta in deltas) == "abc"
    assert [delta["control_tokens"] for delta in deltas if "control_tokens" in delta] == [CONTROL]


async def test_a_stream_of_a_response_tells_control_tokens_with_its_item() -> None:
    events = await told(ResponsesRoute, None)
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "abc"
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["text"] == "abc" and item["control_tokens"] == CONTROL


@pytest.mark.parametrize("text", ["</tool_call>" * 3, "a</tool_call>"])
def test_control_tokens_alone_make_no_text(text: str) -> None:
    ids = PROCESSOR.tokenizer.encode(text, add_special_tokens=False)
    assert TextStream(PROCESSOR).feed(ids) == text.replace("</tool_call>", "")
