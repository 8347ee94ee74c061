"""Text that is told while a response grows is never taken back."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from relax_server.gateway.text_stream import TextStream
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.models.tool_calls import OPEN

PROCESSOR = Processor.load(resolve_model("relax/tiny-omni"))
STOPS: list[tuple[str, ...]] = [(), ("END",), ("\n\n", "END")]
PIECES = ["a", "<", "<tool", "<tool_", "_call>", OPEN, "\n", "\n\n", "END", "EN", "D", "é", "日本", "🎈", " "]


def told(text: str, stop: tuple[str, ...], stride: int) -> list[str]:
    """What a client is told of a response that grows by `stride` tokens at a time."""
    ids = PROCESSOR.tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(PROCESSOR, stop)
    return [stream.feed(ids[:n]) for n in [*range(stride, len(ids), stride), len(ids)]]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(STOPS), st.integers(1, 5))
def test_what_is_told_begins_the_text_up_to_a_stop_or_a_call(parts: list[str], stop: tuple[str, ...], stride: int) -> None:
    text = "".join(parts)
    whole = text[: min((at for end in (*stop, OPEN) if (at := text.find(end)) >= 0), default=len(text))]
    said = ""
    for piece in told(text, stop, stride):
        said += piece
        assert whole.startswith(said)


def test_no_part_of_a_tool_call_and_no_half_character_is_told() -> None:
    assert told("go 🎈<tool_call>guess(7)</tool_call>", (), 1)[-1] == ""
    assert "".join(told("go 🎈<tool_call>guess(7)</tool_call>", (), 1)) == "go 🎈"
    assert "".join(told("see <tool_", (), 1)) == "see "


def test_the_end_brings_what_was_held_back() -> None:
    ids = PROCESSOR.tokenizer.encode("see EN", add_special_tokens=False)
    stream = TextStream(PROCESSOR, ("END",))
    assert (stream.feed(ids), stream.finish("see EN"), stream.finish("see EN")) == ("see ", "EN", "")
