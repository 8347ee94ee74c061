"""What can be said of a text's tokens without encoding it, so that what cannot fit is refused at no cost."""

from __future__ import annotations

import sys
from typing import Any

from relax_sdk.errors import TokenError

DENSE = 8
"""Characters a token that few texts have on average; of longer texts the beginning is encoded first."""
MARGIN = 64
"""Tokens that the beginning of a text may have more than the same characters have in the whole."""
COMPOSED = 4
"""Characters that one is composed of, at most, by Unicode's NFC."""


def context_of(config: Any) -> int:
    """Positions that a model can tell apart, `sys.maxsize` if it does not say.

    Args:
        config: of its text part, from transformers.
    """
    most = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    layers = [rope, *(inner for inner in rope.values() if isinstance(inner, dict))]
    factor = max([float(layer.get("factor") or 1.0) for layer in layers])
    return int(most * max(1.0, factor)) if most else sys.maxsize


class TextBounds:
    """Bounds on the number of tokens that texts have.

    Args:
        backend: the tokenizer, of the package `tokenizers`; None: nothing is known of it.
        context: see `context_of`.
    """

    def __init__(self, backend: Any, context: int) -> None:
        self.context = context
        self._longest = _longest_token(backend)

    def fewest_tokens(self, characters: int) -> int:
        """Tokens that a text of so many characters has at least."""
        return characters // self._longest if self._longest else 0

    def encode(self, backend: Any, text: str) -> list[int]:
        """The ids of a long text, while other threads go on.

        Args:
            backend: the tokenizer.
            text: without a bound.

        Raises:
            TokenError: more tokens than the model has positions; a text that is far too long is not encoded as a whole.
        """
        at = DENSE * self.context
        while at < len(text):
            found = len(_encode(backend, text[:at]))
            if found > self.context + MARGIN:
                raise TokenError(
                    f"the first {at} of {len(text)} characters have {found} tokens; the model has {self.context} positions"
                )
            at *= 4
        return _encode(backend, text)


def _encode(backend: Any, text: str) -> list[int]:
    """As `backend.encode`, which holds Python's lock all the time."""
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _longest_token(backend: Any) -> int:
    """Characters that one token can stand for, at most; 0: any number, or unknown."""
    if backend is None or type(backend.model).__name__ != "BPE":
        return 0  # others have one token for all words that they do not know
    normalizer = type(backend.normalizer).__name__ if backend.normalizer is not None else ""
    if normalizer not in ("", "NFC") or (backend.model.unk_token is not None and not backend.model.byte_fallback):
        return 0
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)))
    return longest * (COMPOSED if normalizer else 1)
