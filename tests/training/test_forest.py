"""Packing samples into forests: nothing is lost, nothing is merged that differs, and the mask is that of the prefix tree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.training.batch import TokenBatch, make_batch, read_features
from relax_server.training.forest import Forest, pack
from training_data import ITEMS, answer, conversation, every_token, features_of, make_sample, prompt, read

from relax_sdk import TokenError
from relax_sdk.trajectory import Sample


@pytest.fixture(scope="module")
def text() -> Processor:
    return Processor.load(resolve_model("relax/tiny-qwen3"))


@pytest.fixture(scope="module")
def omni() -> Processor:
    return Processor.load(resolve_model("relax/tiny-omni"))


def batch_of(samples: list[Sample], processor: Processor) -> TokenBatch:
    return make_batch(samples, processor, read_features(samples, processor, read))


def seen_by(forest: Forest, token: int) -> list[int]:
    """Packed tokens that a token sees, itself included."""
    return [k for k in range(token + 1) if token < forest.end[k]]


def check(batch: TokenBatch, forests: list[Forest], samples: list[Sample]) -> None:
    """Every trained token is there once, and what its row sees is exactly what came before it in its sample."""
    entries = np.concatenate([f.entry for f in forests])
    assert sorted(entries.tolist()) == list(range(len(batch.trained)))
    for forest in forests:
        keys = np.array([*forest.ids])
        is_media = np.zeros(len(forest), bool)
        is_media[forest.media_token] = True
        for entry, row in zip(forest.entry, forest.row, strict=True):
            sample, at = batch.trained.sample[entry], batch.trained.at[entry]
            seen = seen_by(forest, int(forest.rows[row]))
            a = batch.start[sample]
            assert keys[seen].tolist() == samples[sample].ids[:at]
            np.testing.assert_array_equal(forest.positions[:, seen], batch.positions[:, a : a + at])
            mine = [forest.media[i].tensor for i in forest.media_item[np.isin(forest.media_token, seen)]]
            theirs = batch.keys[a : a + at]
            theirs = theirs[theirs >= batch.vocab_size] - batch.vocab_size
            assert len(mine) == len(theirs)
            assert all(m is batch.media[t >> 20].tensor for m, t in zip(mine, theirs, strict=True))


tokens = st.lists(st.integers(20, 23), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(tokens, min_size=1, max_size=3),
    answers=st.lists(tokens, min_size=1, max_size=5),
    budget=st.integers(4, 60),
    share=st.booleans(),
    data=st.data(),
)
def test_forests_hold_every_sample_exactly(text, prompts, answers, budget, share, data):
    samples = []
    for p in prompts:
        for a in answers:
            b = data.draw(tokens)
            samples.append(make_sample(p + a + b, [0] * len(p) + [1] * len(a) + [data.draw(st.integers(0, 1)) for _ in b]))
    batch = batch_of(samples, text)
    forests = pack(batch, budget, share)
    check(batch, forests, samples)
    longest = max(batch.n_inputs)
    assert all(len(f) <= max(budget, longest) for f in forests)
    if not share:
        assert sum(map(len, forests)) == batch.n_inputs.sum()


def test_each_prefix_is_computed_once(text):
    shared, turn = list(range(20, 60)), list(range(60, 70))
    samples = [
        make_sample(shared + turn + [90, 91], [0] * 50 + [1, 1]),
        make_sample(shared + turn + [92, 93], [0] * 50 + [1, 1]),
        make_sample(shared + turn, [0] * 40 + [1] * 10),
        make_sample([*shared, 94], [0] * 40 + [1]),
        make_sample(shared + turn + [90, 91], [0] * 50 + [1, 1]),
    ]
    batch = batch_of(samples, text)
    (forest,) = pack(batch, 1000)
    check(batch, [forest], samples)
    assert len(forest) == 40 + 10 + 2
    assert batch.padded_tokens == 5 * 51


def test_groups_stay_whole_where_the_budget_allows(text):
    samples = [make_sample([20 + g] * 30 + [80 + i, 90], [0] * 30 + [1, 1]) for g in range(4) for i in range(5)]
    forests = pack(batch_of(samples, text), 80)
    assert [len(f) for f in forests] == [70, 70]


def test_a_group_over_the_budget_is_split(text):
    samples = [make_sample([20] * 30 + [80 + i] * 10 + [90], [0] * 30 + [1] * 11) for i in range(8)]
    batch = batch_of(samples, text)
    forests = pack(batch, 64)
    check(batch, forests, samples)
    assert len(forests) == 3
    assert max(map(len, forests)) <= 64


def test_media_of_equal_ids_are_not_merged(omni):
    samples = []
    for name in ("image", "image2"):
        ids, media = prompt(omni, name, "which?")
        samples += [make_sample(ids + answer(omni, a), [0] * len(ids) + [1, 1], media) for a in "AB"]
    assert samples[0].ids == samples[2].ids
    batch = batch_of(samples, omni)
    (forest,) = pack(batch, 4000)
    check(batch, [forest], samples)
    before = samples[0].ids.index(omni.placeholder_ids["image"])
    assert len(forest) == before + 2 * (len(samples[0].ids) - 2 - before + 2)
    assert len(forest.media) == 2


def test_media_in_a_later_observation(omni):
    first = (["audio", "what do you hear?"], "B")
    samples = [
        conversation(omni, [first, (["image", "and see?"], "C"), (["video", "and now?"], "D")]),
        conversation(omni, [first, (["image2", "and see?"], "C")]),
        conversation(omni, [first, (["image", "and see?"], "A")]),
    ]
    batch = batch_of(samples, omni)
    (forest,) = pack(batch, 4000)
    check(batch, [forest], samples)
    assert len(forest.media) == 4
    assert len(forest) < sum(batch.n_inputs) - len(samples[1].ids)


@pytest.mark.parametrize("parts", [["image", "a", "audio", "b"], ["video"], ["short", "long", "x"], ["words"]])
def test_positions_are_the_processors(omni, parts):
    ids, media = prompt(omni, *parts)
    sample = every_token(ids + answer(omni, "some answer"), omni, media)
    batch = batch_of([sample, sample], omni)
    expected = omni.positions(sample.ids, features_of(omni, media))
    np.testing.assert_array_equal(batch.positions, np.concatenate([expected, expected], 1))


def test_samples_that_do_not_fit_together_are_refused(omni):
    ids, media = prompt(omni, "image", "which?")
    good = make_sample([*ids, 70], [0] * len(ids) + [1], media)
    with pytest.raises(TokenError, match=r"sample 1: 6 media placeholders, but 0 embeddings of 0 media items"):
        batch_of([good, make_sample([*ids, 70], [0] * len(ids) + [1])], omni)
    with pytest.raises(TokenError, match="another kind"):
        sound = [omni.placeholder_ids["audio"]] * 6
        batch_of([make_sample([20, *sound, 30], [0] * 7 + [1], [ITEMS["image"]])], omni)
    with pytest.raises(TokenError, match="nothing predicts it"):
        batch_of([make_sample([20, 30], [1, 1])], omni)
    with pytest.raises(TokenError, match="no trained token"):
        batch_of([make_sample([20, 30], [0, 0])], omni)
    with pytest.raises(TokenError, match="never be sampled"):
        batch_of([make_sample([20, omni.placeholder_ids["image"], 30], [0, 1, 1], [])], omni)
    with pytest.raises(TokenError, match="not finite"):
        batch_of([make_sample([20, 30], [0, 1], logprob=float("nan"))], omni)
