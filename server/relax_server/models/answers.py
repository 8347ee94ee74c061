"""Reads the tokens of a response as a message: its text, its tool calls, and the control tokens that are neither."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from relax_sdk.messages import AssistantMessage, ControlToken, Text
from relax_server.models.tool_calls import ControlText, split_tool_calls

_TAG = re.compile(r"<\S+>|\[\S+\]")


class AnswerReader:
    """Tells text from control tokens.

    Control tokens are the special tokens of the tokenizer, those added to its vocabulary that are written as a tag, such as
    `<think>`, and ids that it has no token for. Other added tokens, such as runs of spaces, are text.

    Args:
        tokenizer: of the model, from transformers.
        vocab_size: of the model; it may be larger than the tokenizer's.
        eos_ids: that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._eos_ids = tokenizer, frozenset(eos_ids)
        self.control: dict[int, str] = {id: f"<|{id}|>" for id in set(range(vocab_size)) - set(tokenizer.get_vocab().values())}
        """Names of the control tokens by id."""
        for id, token in tokenizer.added_tokens_decoder.items():
            if token.special or _TAG.fullmatch(token.content):
                self.control[id] = token.content
        for id in self._eos_ids:
            self.control.setdefault(id, str(tokenizer.convert_ids_to_tokens(id)))

    def message(self, ids: Sequence[int], finish_reason: str, tools: Sequence[Mapping[str, Any]] = ()) -> AssistantMessage:
        """A response as a message.

        Args:
            ids: response tokens; an end-of-turn token at their end is left out.
            finish_reason: `stop`, `length` or `abort`.
            tools: OpenAI schemas of the tools the model was offered.
        """
        text, calls, control = split_tool_calls(self._pieces(ids), tools)
        content = (Text(text),) if text else ()
        return AssistantMessage(
            content=content, tool_calls=tuple(calls), finish_reason=finish_reason, control_tokens=tuple(control)
        )

    def plain(self, ids: Sequence[int]) -> tuple[str, tuple[ControlToken, ...]]:
        """A response as text and control tokens, its tool calls not read."""
        text, control = "", []
        for piece in self._pieces(ids):
            if isinstance(piece, ControlText):
                control.append(ControlToken(str(piece), len(text)))
            else:
                text += piece
        return text, tuple(control)

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        if ids and ids[-1] in self._eos_ids:
            ids = ids[:-1]
        pieces: list[str] = []
        start = 0
        for at, id in enumerate(ids):
            if id in self.control:
                pieces += [self._decode(ids[start:at]), ControlText(self.control[id])]
                start = at + 1
        return [*pieces, self._decode(ids[start:])]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
