"""What is rendered once is remembered, as far as it fits."""

from __future__ import annotations

from typing import Any

import pytest
from relax_server.models.processor import Rendered
from relax_server.rollout import rendering
from relax_server.rollout.rendering import Renderer

from relax_sdk import Message, Text


class Lengths:
    """A processor whose conversations have as many tokens as their text says."""

    def __init__(self) -> None:
        self.rendered: list[int] = []

    def render(self, messages: list[Message], tools: Any) -> Rendered:
        self.rendered.append(int(messages[0].text))
        return Rendered([0] * self.rendered[-1])


def test_what_is_remembered_has_a_bound_in_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "CACHE_TOKENS", 100)
    processor = Lengths()
    renderer = Renderer(processor)  # type: ignore[arg-type]
    for tokens in (30, 30, 31, 32, 30, 200, 200, 33, 31, 33, 30):
        assert len(renderer.prompt([Message("user", (Text(str(tokens)),))], (), "").ids) == tokens
    # 200 is never kept, 33 takes the place of 31, which was asked for longest ago, and 31 then that of 32
    assert processor.rendered == [30, 31, 32, 200, 200, 33, 31]
