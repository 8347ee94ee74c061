"""Two processes on gloo train as one does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_data import largest_difference, letter_groups, make_policy, parameters, read
from training_worker import Worker

OMNI = "relax/tiny-omni"


def train(rank: int, world_size: int, port: int, token_budget: int) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    from relax_server.training.megatron import parallel

    parallel.initialize(seed=0, rank=rank, world_size=world_size, port=port)
    policy = make_policy(OMNI, token_budget=token_budget, eps=1e-3, kl_coef=0.1, old_logprobs="recompute")
    metrics = [policy.train_step(letter_groups(policy.processor, seed=i), read, i + 1) for i in range(3)]
    return metrics, parameters(policy)


def save(rank: int, folder: Any, port: int) -> float:
    """A checkpoint written and read by two ranks."""
    from relax_server.training.megatron import parallel

    parallel.initialize(seed=0, rank=rank, world_size=2, port=port)
    policy = make_policy(OMNI)
    policy.train_step(letter_groups(policy.processor), read, 0)
    policy.save(folder / "c", {})
    other = make_policy(OMNI)
    other.load(folder / "c")
    policy.train_step(letter_groups(policy.processor, seed=1), read, 1)
    other.train_step(letter_groups(policy.processor, seed=1), read, 1)
    return largest_difference(parameters(policy), parameters(other))


def go_on(rank: int, world_size: int, port: int, begin: Any, until: int, end: Any) -> dict[str, np.ndarray]:
    """Steps from a checkpoint, or the beginning, and a checkpoint at their end, if it is named."""
    from relax_server.training.megatron import parallel

    parallel.initialize(seed=0, rank=rank, world_size=world_size, port=port)
    policy = make_policy(OMNI, eps=1e-3, lr=5e-3, warmup_steps=0)
    if begin is not None:
        policy.load(begin)
    while policy.step < until:
        policy.train_step(letter_groups(policy.processor, seed=policy.step), read, policy.step)
    if end is not None:
        policy.save(end, {})
    return parameters(policy)


@pytest.fixture(scope="module")
def pair():
    workers = [Worker(), Worker()]
    yield workers
    for w in workers:
        w.close()


def free_port() -> int:
    from relax_server.training.megatron import parallel

    return parallel.free_port()


@pytest.mark.parametrize("token_budget", [64, 100_000])
def test_two_ranks_are_one(worker, pair, token_budget):
    """With the large budget there is one forest, so that the second rank has nothing to compute."""
    one, weights = worker.run(train, 0, 1, 0, token_budget)
    port = worker.run(free_port)
    for rank, w in enumerate(pair):
        w.send(train, rank, 2, port, token_budget)
    (first, theirs), (second, others) = [w.receive() for w in pair]
    assert largest_difference(theirs, others) == 0
    assert largest_difference(weights, theirs) < 2e-6
    timeless = lambda metrics: {k: v for k, v in metrics.items() if not k.startswith("seconds")}
    for a, b, c in zip(one, first, second, strict=True):
        assert timeless(b) == timeless(c)
        assert timeless(b) == pytest.approx(timeless(a), rel=1e-3, abs=1e-5)


def test_a_checkpoint_of_two_ranks(worker, pair, tmp_path):
    port = worker.run(free_port)
    for rank, w in enumerate(pair):
        w.send(save, rank, tmp_path, port)
    assert [w.receive() for w in pair] == [0, 0]


@pytest.mark.parametrize("first", [1, 2])
def test_a_checkpoint_of_another_number_of_ranks(worker, pair, tmp_path, first):
    """One rank writes what two go on with, and the other way round, as if one had gone all the way."""

    def run(ranks: int, begin: Any, until: int, end: Any) -> dict[str, np.ndarray]:
        if ranks == 1:
            return worker.run(go_on, 0, 1, 0, begin, until, end)
        port = worker.run(free_port)
        for rank, w in enumerate(pair):
            w.send(go_on, rank, 2, port, begin, until, end)
        one, other = [w.receive() for w in pair]
        assert largest_difference(one, other) == 0
        return one

    run(first, None, 1, tmp_path / "c")
    assert largest_difference(run(3 - first, tmp_path / "c", 2, None), run(1, None, 2, None)) < 2e-6
