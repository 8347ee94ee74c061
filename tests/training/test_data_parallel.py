"""Two processes on gloo train as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_workers import Ranks, begin
from relax_server.models.processor import Processor
from relax_server.models.weight_files import read_weights
from training_data import largest_difference, letter_groups, make_policy, read

from relax_sdk.layout import LayoutConfig

OMNI = "relax/tiny-omni"
ONE, TWO = LayoutConfig(), LayoutConfig(dp=2)


def weights(policy: Any, folder: Path) -> dict[str, np.ndarray]:
    """The policy's weights, by way of a folder; every rank calls it."""
    policy.export_weights(folder)
    return {name: tensor.numpy().copy() for name, tensor in read_weights(folder).items()}


def train(rank: int, layout: LayoutConfig, meeting: Path, folder: Path, token_budget: int, n_groups: int) -> Any:
    begin(rank, layout, meeting)
    policy = make_policy(OMNI, token_budget=token_budget, eps=1e-3, kl_coef=0.1, old_logprobs="recompute")
    batches = [letter_groups(policy.processor, n_groups, 6 if n_groups > 1 else 1, seed=i) for i in range(3)]
    metrics = [policy.train_step(batch, read, i + 1) for i, batch in enumerate(batches)]
    return metrics, weights(policy, folder)


def save(rank: int, layout: LayoutConfig, meeting: Path, folder: Path) -> float:
    """A checkpoint that two ranks write while they train, and read."""
    begin(rank, layout, meeting)
    policy = make_policy(OMNI)
    policy.train_step(letter_groups(policy.processor), read, 0)
    policy.begin_save(folder / "c", {})
    policy.train_step(letter_groups(policy.processor, seed=1), read, 1)
    policy.finish_save()
    other = make_policy(OMNI)
    other.load(folder / "c")
    other.train_step(letter_groups(policy.processor, seed=1), read, 1)
    return largest_difference(weights(policy, folder / "a"), weights(other, folder / "b"))


def go_on(
    rank: int, layout: LayoutConfig, meeting: Path, folder: Path, start: Any, until: int, end: Any
) -> dict[str, np.ndarray]:
    """Steps from a checkpoint, or the beginning, and a checkpoint at their end, if it is named."""
    begin(rank, layout, meeting)
    policy = make_policy(OMNI, eps=1e-3, lr=5e-3, warmup_steps=0)
    if start is not None:
        policy.load(start)
    while policy.step < until:
        policy.train_step(letter_groups(policy.processor, seed=policy.step), read, policy.step)
    if end is not None:
        policy.save(end, {})
    return weights(policy, folder)


def prepared(rank: int, layout: LayoutConfig, meeting: Path) -> list[str]:
    """Media, by their hashes, that this rank prepares for a step; each group of the batch has its own."""
    begin(rank, layout, meeting)
    policy = make_policy(OMNI, token_budget=64)
    made: list[str] = []
    whole = policy.processor.features

    def features(data: bytes, sha256: str, kind: Any) -> Any:
        made.append(sha256)
        return whole(data, sha256, kind)

    policy.processor.features = features  # type: ignore[method-assign]
    policy.train_step(letter_groups(Processor.load(policy.model_path)), read, 0)
    return sorted(made)


@pytest.mark.parametrize(("token_budget", "n_groups"), [(64, 4), (100_000, 4), (100_000, 1)])
def test_two_ranks_are_one(ranks: Ranks, tmp_path: Path, token_budget: int, n_groups: int) -> None:
    """With the large budget one forest holds all, and is divided; a single sample leaves the second rank nothing to compute."""
    ((one, alone),) = ranks.run(ONE, train, tmp_path, token_budget, n_groups)
    (first, theirs), (second, others) = ranks.run(TWO, train, tmp_path, token_budget, n_groups)
    assert largest_difference(theirs, others) == 0
    assert largest_difference(alone, theirs) < 2e-6
    apart = ("seconds", "forest", "packed", "shared") if token_budget > 64 else ("seconds",)
    plain = lambda metrics: {k: v for k, v in metrics.items() if not k.startswith(apart)}
    for a, b, c in zip(one, first, second, strict=True):
        assert plain(b) == plain(c)
        assert plain(b) == pytest.approx(plain(a), rel=1e-3, abs=1e-5)


def test_a_checkpoint_of_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(TWO, save, tmp_path) == [0, 0]


@pytest.mark.parametrize("first", [ONE, TWO])
def test_a_checkpoint_of_another_number_of_ranks(ranks: Ranks, tmp_path: Path, first: LayoutConfig) -> None:
    """One rank writes what two go on with, and the other way round, as if one had gone all the way."""
    second = TWO if first is ONE else ONE
    ranks.run(first, go_on, tmp_path, None, 1, tmp_path / "c")
    changed = ranks.run(second, go_on, tmp_path, tmp_path / "c", 2, None)[0]
    assert largest_difference(changed, ranks.run(ONE, go_on, tmp_path, None, 2, None)[0]) < 2e-6


def test_each_rank_prepares_the_media_of_its_own_forests(ranks: Ranks) -> None:
    everything = ranks.run(ONE, prepared)[0]
    assert len(everything) == len(set(everything)) == 4
    first, second = ranks.run(TWO, prepared)
    assert first and second and sorted(first + second) == everything
    assert ranks.run(LayoutConfig(pp=2), prepared) == [everything, []], "the second stage has no towers"
