"""Bounds on tokens that are told without encoding, and long texts that are encoded beside other threads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import LONG_TEXT, Processor
from relax_server.models.text_bounds import DENSE, TextBounds, context_of
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from relax_sdk.errors import TokenError

OMNI = Processor.load(resolve_model("relax/tiny-omni"))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200) | st.lists(st.sampled_from(["<|vision_start|>", "<|im_end|>", "a", "é", "漢"])).map("".join))
def test_no_text_has_fewer_tokens_than_are_told(text: str) -> None:
    assert OMNI.bounds.fewest_tokens(len(text)) <= len(OMNI.tokenizer.encode(text, add_special_tokens=False))


def test_a_long_text_has_the_same_ids_as_by_the_tokenizer_itself() -> None:
    text = ("a text é漢 <|im_end|>\n" * (LONG_TEXT // 8))[: OMNI.bounds.context]
    assert len(text) == OMNI.bounds.context <= LONG_TEXT
    backend = OMNI.tokenizer.backend_tokenizer
    assert OMNI.bounds.encode(backend, text) == OMNI.tokenizer.encode(text, add_special_tokens=False)


def test_a_text_that_is_far_too_long_is_never_encoded_as_a_whole() -> None:
    lengths: list[int] = []

    class Counting:
        def encode_batch_fast(self, texts: list[str], add_special_tokens: bool):
            lengths.append(len(texts[0]))
            return [SimpleNamespace(ids=list(range(len(texts[0]))))]

    bounds = TextBounds(None, context=100)
    with pytest.raises(TokenError, match=r"the first 800 of 1000000 characters have 800 tokens; the model has 100 positions"):
        bounds.encode(Counting(), "x" * 1_000_000)
    assert lengths == [DENSE * 100]


def test_what_can_be_squeezed_has_no_bound_or_a_wider_one() -> None:
    def bounds(model, normalizer=None) -> TextBounds:
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
        tokenizer.normalizer = normalizer
        return TextBounds(tokenizer, 10)

    plain = models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])
    assert bounds(plain).fewest_tokens(100) == 50
    assert bounds(plain, normalizers.NFC()).fewest_tokens(100) == 12
    assert bounds(plain, normalizers.Strip()).fewest_tokens(100) == 0
    assert bounds(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?")).fewest_tokens(100) == 0
    assert bounds(models.WordLevel(vocab={"a": 0, "?": 1}, unk_token="?")).fewest_tokens(100) == 0
    assert TextBounds(None, 10).fewest_tokens(100) == 0


def test_a_stretched_context_counts_whole() -> None:
    assert context_of(SimpleNamespace(max_position_embeddings=4096)) == 4096
    assert context_of(SimpleNamespace(max_position_embeddings=4096, rope_scaling={"factor": 4.0})) == 16384
    layers = {"full_attention": {"factor": 2.0}, "sliding": {"rope_type": "default"}}
    assert context_of(SimpleNamespace(max_position_embeddings=100, rope_parameters=layers)) == 200
    assert context_of(SimpleNamespace()) > 1 << 40
