"""Trajectories: merging turns by strict prefix, version spans, storage, seeds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_sdk.errors import JournalError, TokenError
from relax_sdk.media import MediaRef
from relax_sdk.trajectory import (
    Group,
    Status,
    Trajectory,
    Turn,
    VersionSpan,
    decode_group,
    derive_seed,
    encode_group,
    mean_reward,
    token_versions,
)

SOUND, PICTURE = MediaRef("a" * 64, "audio/wav", 10, duration=1.0), MediaRef("b" * 64, "image/png", 20, 4, 4)

ids = st.lists(st.integers(0, 300), max_size=6)
responses = st.lists(st.integers(0, 300), min_size=1, max_size=6)


def turn(prompt: list[int], response: list[int], version: int = 0, media: list[MediaRef] | None = None, **fields: Any) -> Turn:
    spans = [VersionSpan(version, 0, len(response))] if response else []
    return Turn(prompt, response, [-0.1 * (i + 1) for i in range(len(response))], spans, media=media or [], **fields)


def trajectory(*turns: Turn, **fields: Any) -> Trajectory:
    return Trajectory("t", "env-v0", "1", 0, "g", 0, 1, 7, Status.COMPLETED, turns=list(turns), **fields)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[Turn], list[int]]:
    """Turns, some of which go on from the turn before and some of which rewrote history; and where new samples start."""
    turns: list[Turn] = []
    starts: list[int] = []
    history: list[int] = []
    for index in range(draw(st.integers(1, 5))):
        rewritten = index > 0 and draw(st.booleans())
        if rewritten or index == 0:
            starts.append(index)
            # A first token of its own makes sure that this prompt does not start with the history.
            history = [1000 + index, *draw(ids)]
        else:
            history = history + draw(ids)
        response = draw(responses)
        turns.append(turn(history, response, version=index))
        history = history + response
    return turns, starts


@given(conversations())
def test_turns_are_merged_by_strict_prefix(case: tuple[list[Turn], list[int]]) -> None:
    turns, starts = case
    samples = trajectory(*turns).samples()
    assert len(samples) == len(starts), "a new sample starts where history was rewritten, and only there"
    for sample, first, end in zip(samples, starts, [*starts[1:], len(turns)], strict=True):
        mine = turns[first:end]
        assert sample.ids == mine[-1].prompt_ids + mine[-1].response_ids
        n = len(sample.ids)
        assert len(sample.loss_mask) == len(sample.logprobs) == len(sample.versions) == len(sample.turn) == n
        produced = [i for i in range(n) if sample.loss_mask[i]]
        assert [sample.ids[i] for i in produced] == [t for one in mine for t in one.response_ids]
        assert [sample.logprobs[i] for i in produced] == [p for one in mine for p in one.response_logprobs]
        assert [sample.turn[i] for i in produced] == [k for k, one in enumerate(mine, first) for _ in one.response_ids]
        assert [sample.versions[i] for i in produced] == [sample.turn[i] for i in produced], "here turn k has version k"
        given_ = [i for i in range(n) if not sample.loss_mask[i]]
        assert all((sample.logprobs[i], sample.versions[i], sample.turn[i]) == (0.0, -1, -1) for i in given_)


@given(conversations())
def test_every_produced_token_is_trained_on_exactly_once(case: tuple[list[Turn], list[int]]) -> None:
    played = trajectory(*case[0])
    assert sum(sum(sample.loss_mask) for sample in played.samples()) == played.n_response_tokens


def test_two_turns_with_media() -> None:
    first = turn([1, 2], [3], media=[SOUND])
    second = turn([1, 2, 3, 4, 5], [6], media=[SOUND, PICTURE])
    (sample,) = trajectory(first, second).samples()
    assert sample.ids == [1, 2, 3, 4, 5, 6] and sample.loss_mask == [0, 0, 1, 0, 0, 1]
    assert sample.media == [SOUND, PICTURE]


def test_equal_ids_with_other_media_are_another_history() -> None:
    first, second = turn([1, 2], [3], media=[SOUND]), turn([1, 2, 3, 4], [5], media=[PICTURE])
    assert [s.media for s in trajectory(first, second).samples()] == [[SOUND], [PICTURE]]


def test_a_response_changed_on_its_way_into_the_next_prompt_is_another_history() -> None:
    assert len(trajectory(turn([1], [2, 3]), turn([1, 2, 9, 4], [5])).samples()) == 2
    assert len(trajectory(turn([1], [2, 3]), turn([1, 2], [5])).samples()) == 2, "a shorter prompt too"


def test_conversations_led_at_once_are_a_sample_each() -> None:
    one, other = turn([1], [2, 3]), turn([7], [8])
    more, rest = turn([1, 2, 3, 4], [5]), turn([7, 8, 9], [6])
    samples = trajectory(one, other, more, rest).samples()
    assert [s.ids for s in samples] == [[1, 2, 3, 4, 5], [7, 8, 9, 6]]
    assert [s.turn for s in samples] == [[-1, 0, 0, -1, 2], [-1, 1, -1, 3]]


def test_a_turn_without_tokens_is_left_out() -> None:
    (sample,) = trajectory(turn([1], []), turn([1], [2]), turn([1, 2, 3], [])).samples()
    assert sample.ids == [1, 2] and sample.turn == [-1, 1]
    assert trajectory().samples() == []


def test_samples_do_not_share_lists_with_the_turns() -> None:
    played = trajectory(turn([1], [2]), turn([1, 2, 3], [4]))
    played.samples()[0].ids.append(99)
    assert played.turns[0].prompt_ids == [1] and played.samples()[0].ids == [1, 2, 3, 4]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=5))
def test_version_spans_cover_the_response(pieces: list[tuple[int, int]]) -> None:
    spans, at = [], 0
    for version, length in pieces:
        spans.append(VersionSpan(version, at, at + length))
        at += length
    one = Turn([1], [5] * at, [-1.0] * at, spans)
    assert token_versions(one) == [v for v, length in pieces for _ in range(length)]
    played = trajectory(one)
    assert (played.version_min, played.version_max) == (min(v for v, _ in pieces), max(v for v, _ in pieces))


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [VersionSpan(0, 0, 2)],
        [VersionSpan(0, 1, 3)],
        [VersionSpan(0, 0, 2), VersionSpan(1, 1, 3)],
        [VersionSpan(0, 0, 0), VersionSpan(0, 0, 3)],
        [VersionSpan(0, 0, 4)],
    ],
    ids=["none", "short", "late", "overlap", "empty", "long"],
)
def test_spans_that_do_not_cover_the_response(spans: list[VersionSpan]) -> None:
    with pytest.raises(TokenError, match="do not cover 3 response tokens"):
        trajectory(Turn([1], [2, 3, 4], [0.0] * 3, spans)).samples()


def test_versions_of_a_group() -> None:
    group = Group(
        "g", "env", 0, [trajectory(turn([1], [2], 3), turn([1, 2], [3], 5)), trajectory(turn([1], [2], 4)), trajectory()]
    )
    assert (group.version_min, group.version_max) == (3, 5)
    assert group.trajectories[2].version_min is None and Group("g", "env", 0, []).version_min == 0


plain = st.recursive(st.none() | st.booleans() | st.integers(-(2**31), 2**31) | st.text(max_size=5), st.lists, max_leaves=4)


@given(
    st.lists(st.tuples(ids, responses, st.floats(allow_nan=False)), max_size=3),
    st.sampled_from(list(Status)),
    st.dictionaries(st.text(max_size=5), plain, max_size=3),
    st.integers(0, 2**63 - 1),
)
def test_a_group_survives_storage(turns: list[Any], status: Status, info: dict[str, Any], seed: int) -> None:
    full = [turn(p, r, media=[SOUND, PICTURE], reward=x, routed_experts=b"\0\xff", routed_shape=[1, 2, 3]) for p, r, x in turns]
    played = replace(trajectory(*full), status=status, info=info, seed=seed, error="é", rewards={"env": 0.1})
    group = Group("g", "env-v0", 3, [played, trajectory()])
    assert decode_group(encode_group(group)) == group


@pytest.mark.parametrize("data", [b"", b"\xc1", b"text", encode_group(Group("g", "e", 0, [trajectory()]))[:-3]], ids=repr)
def test_a_damaged_group_is_refused(data: bytes) -> None:
    with pytest.raises(JournalError, match="a stored group cannot be read"):
        decode_group(data)


def test_seeds_are_the_same_everywhere() -> None:
    assert derive_seed(0, "train", 3, 1) == 5676399957702460047
    code = "from relax_sdk.trajectory import derive_seed; print(derive_seed(0, 'train', 3, 1))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert int(run.stdout) == derive_seed(0, "train", 3, 1)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=4), st.lists(st.integers(0, 10**6), min_size=1, max_size=4))
def test_seeds_differ(one: list[int], other: list[int]) -> None:
    assert 0 <= derive_seed(*one) < 2**63
    assert (derive_seed(*one) == derive_seed(*other)) == (one == other)


def test_mean_reward() -> None:
    assert mean_reward([]) == 0.0
    assert mean_reward([trajectory(reward=1.0), trajectory(reward=0.5)]) == 0.75
