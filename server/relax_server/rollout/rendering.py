"""Chat messages to token ids, each content once: episodes of a group begin with equal prompts, and many turns are alike."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_sdk.errors import RelaxError, TokenError
from relax_sdk.media import Media
from relax_sdk.messages import Message
from relax_server.models.processor import MediaFeatures, Rendered

if TYPE_CHECKING:
    from relax_server.models.processor import Processor

CACHE_ITEMS, CACHE_TOKENS = 4096, 1 << 21
"""Pieces that are remembered, and their tokens together."""


@dataclass
class Piece:
    """Rendered messages: a prompt, or what is appended to one."""

    ids: list[int]
    """Wire form. Shared between episodes: never changed in place."""
    media: list[Media]
    """One per placeholder, in order."""
    expanded: list[int] | None = None
    """The ids with one placeholder per embedding, once they were asked for; they are fixed, as the content holds the media."""


class Renderer:
    """A processor that remembers what it rendered lately; safe to use from several threads.

    Args:
        processor: of the model.
    """

    def __init__(self, processor: Processor) -> None:
        self.processor = processor
        self._pieces: OrderedDict[Any, Piece] = OrderedDict()
        self._tokens = 0
        """Tokens of all pieces that are remembered."""
        self._lock = threading.Lock()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], tools_key: str) -> Piece:
        """A whole conversation and the prompt for the next answer.

        Args:
            messages: the conversation.
            tools: OpenAI schemas.
            tools_key: names `tools` in the cache.

        Raises:
            TokenError: the template or the model does not take these messages.
        """
        return self._piece((tuple(messages), tools_key), lambda: self.processor.render(messages, tools))

    def append(self, messages: Sequence[Message], closed: bool) -> Piece:
        """The tokens that follow a response.

        Args:
            messages: the new ones.
            closed: whether the response ended with an end-of-turn token.

        Raises:
            TokenError: the template or the model does not take these messages.
        """
        return self._piece((tuple(messages), closed), lambda: self.processor.render_append(messages, closed))

    def expanded(self, piece: Piece, features: Sequence[MediaFeatures]) -> list[int]:
        """A piece's ids with its placeholders expanded.

        Raises:
            TokenError: placeholders and features differ in number or kind.
        """
        if piece.expanded is None:
            piece.expanded = self.processor.expand(piece.ids, features)
        return piece.expanded

    def _piece(self, key: Any, render: Callable[[], Rendered]) -> Piece:
        try:
            with self._lock:
                piece = self._pieces.get(key)
                if piece is not None:
                    self._pieces.move_to_end(key)
                    return piece
        except TypeError:  # tool calls hold dictionaries and cannot be looked up
            return self._render(render)
        piece = self._render(render)
        if len(piece.ids) > CACHE_TOKENS:
            return piece
        with self._lock:
            known = self._pieces.setdefault(key, piece)
            self._tokens += len(piece.ids) if known is piece else 0
            while len(self._pieces) > CACHE_ITEMS or self._tokens > CACHE_TOKENS:
                self._tokens -= len(self._pieces.popitem(last=False)[1].ids)
        return known

    def _render(self, render: Callable[[], Rendered]) -> Piece:
        try:
            rendered = render()
        except RelaxError:
            raise
        except Exception as error:  # a chat template is a program and may raise anything
            raise TokenError(f"the chat template refused the messages ({type(error).__name__}: {error})") from error
        return Piece(rendered.ids, rendered.media)
