"""What is text in a response and what is not, over tokens of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_server.gateway.openai_chat import shown
from relax_server.gateway.text_stream import TextStream
from relax_server.models.answers import AnswerReader
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from relax_sdk.messages import AssistantMessage, ControlToken, Message
from relax_sdk.trajectory import Turn

PROCESSOR = Processor.load(resolve_model("relax/tiny-omni"))
CONTROL = PROCESSOR.answers.control
IDS = {name: id for id, name in CONTROL.items()}
OPEN, CLOSE, END, START = (IDS[name] for name in ("<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>"))
CALL = '{"name": "guess", "arguments": {"number": 3}}'


def ids_of(*pieces: str | int) -> list[int]:
    """Text as ordinary tokens, and ids as they are."""
    out: list[int] = []
    for piece in pieces:
        out += [piece] if isinstance(piece, int) else PROCESSOR.tokenizer.encode(piece, add_special_tokens=False)
    return out


def read(*pieces: str | int) -> AssistantMessage:
    return PROCESSOR.parse(ids_of(*pieces), "stop")


def test_control_tokens_are_no_text_and_are_told_in_order():
    """The answers of a policy that was paid for the length of its text, until what it wrote was no text any more."""
    message = read("ab", CLOSE, CLOSE, "c", CLOSE, CLOSE, CLOSE, CLOSE, END)
    assert message.text == "abc"
    assert message.control_tokens == tuple(ControlToken("</tool_call>", at) for at in (2, 2, 3, 3, 3, 3))


@pytest.mark.parametrize(
    ("pieces", "text", "calls", "control"),
    [
        ([OPEN, CALL, CLOSE, END], "", 1, []),
        (["so ", OPEN, CALL, CLOSE, " then ", OPEN, CALL], "so  then ", 2, []),
        (["so ", START, OPEN, CALL, CLOSE, CLOSE, "x"], "so x", 1, [("<|im_start|>", 3), ("</tool_call>", 3)]),
        (["a", OPEN, OPEN, OPEN], "a", 1, [("<tool_call>", 1), ("<tool_call>", 1)]),
        (["a", END, "b", END], "ab", 0, [("<|im_end|>", 1)]),
        ([END], "", 0, []),
    ],
)
def test_tags_of_calls_are_in_the_calls_and_stray_ones_are_not(pieces, text, calls, control):
    message = read(*pieces)
    assert (message.text, len(message.tool_calls)) == (text, calls)
    assert message.control_tokens == tuple(ControlToken(*token) for token in control)


def test_a_control_token_inside_a_call_is_no_part_of_its_arguments():
    message = read(OPEN, '{"name": "say", "arguments": {"text": "a', START, 'b"}}', CLOSE)
    assert message.tool_calls[0].arguments == {"text": "ab"}
    assert message.control_tokens == (ControlToken("<|im_start|>", 0),)


TOKENS = st.lists(st.one_of(st.integers(0, 267), st.sampled_from([OPEN, CLOSE, START, END])), max_size=40)


@settings(deadline=None, max_examples=300)
@given(TOKENS, st.booleans())
def test_every_token_is_text_or_told(ids: list[int], call: bool):
    """Whatever the tokens: none is seen as text but text, and none but the end and a call's tags is left out."""
    if call:
        ids = [*ids, *ids_of(OPEN, CALL, CLOSE)]
    message = PROCESSOR.parse(ids, "length")
    inner = ids[:-1] if ids and ids[-1] in PROCESSOR.eos_ids else ids
    wanted = [CONTROL[id] for id in inner if id in CONTROL]
    told = [token.token for token in message.control_tokens]
    tags = [name for name in wanted if name in ("<tool_call>", "</tool_call>")]
    assert [name for name in wanted if name not in tags] == [name for name in told if name not in tags]
    assert len(wanted) - len(told) <= 2 * len(message.tool_calls)
    ordinary = [id for id in ids if id not in CONTROL]
    assert len(message.text.encode(errors="replace")) <= 3 * len(ordinary), "no more text than ordinary tokens make"
    assert all(0 <= token.at <= len(message.text) for token in message.control_tokens)
    assert Message.from_openai(message.to_openai()).to_openai() == message.to_openai()
    if not message.tool_calls:
        kept = replace(message, finish_reason="stop")
        assert Message.from_openai(message.to_openai()) == kept


@settings(deadline=None, max_examples=300)
@given(TOKENS, st.sampled_from([(), ("a",), ("\n", "zz")]), st.integers(1, 4))
def test_a_stream_tells_the_text_and_no_control_token(ids: list[int], stop: tuple[str, ...], stride: int):
    answer = shown(PROCESSOR.parse(ids, "stop"), Turn([1], ids, [0.0] * len(ids)), stop, PROCESSOR)
    stream = TextStream(PROCESSOR, stop)
    told = "".join(stream.feed(ids[:n]) for n in [*range(stride, len(ids), stride), len(ids)])
    assert answer.text.startswith(told)
    assert told + stream.finish(answer.text) == answer.text


def test_the_answer_behind_a_control_token():
    message = AssistantMessage.from_openai({"role": "assistant", "content": "hm, 4?4", "control_tokens": [
        {"token": "<think>", "at": 0}, {"token": "</think>", "at": 6}]})  # fmt: skip
    assert isinstance(message, AssistantMessage)
    assert message.text_after("</think>") == "4" and message.text_after("<none>") == message.text == "hm, 4?4"


def test_which_added_tokens_are_text():
    """Runs of spaces are added to some vocabularies and are text; tags are not, nor are ids without a token."""
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = ("    ", "<think>", "[INST]", "<|end|>")
    core.add_tokens([AddedToken(name, special=name == "<|end|>", normalized=False) for name in names])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    size = len(tokenizer) + 1
    spaces, think, inst, end = (core.token_to_id(name) for name in names)
    reader = AnswerReader(tokenizer, size, [end])
    message = reader.message([spaces, think, core.token_to_id("x"), inst, size - 1, end], "stop")
    assert message.text == "    x"
    assert [(t.token, t.at) for t in message.control_tokens] == [("<think>", 4), ("[INST]", 5), (f"<|{size - 1}|>", 5)]
