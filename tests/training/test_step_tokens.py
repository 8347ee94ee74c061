"""What a training step tells of each token is what it trained on, in the order of the samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_workers import Ranks, begin
from training_data import letter_groups, make_policy, read
from training_worker import Worker

from relax_sdk.layout import LayoutConfig

OMNI, TEXT = "relax/tiny-omni", "relax/tiny-qwen3"


def told(settings: dict[str, Any]) -> dict[str, Any]:
    """One step with its account, and the same figures from transformers alone, one sequence after the other."""
    import torch
    from relax_server.roles.token_records import trained_groups
    from relax_server.training.samples import group_advantages
    from transformers import AutoModelForCausalLM

    policy = make_policy(TEXT, eps=1e-3, token_budget=100, **settings)
    reference = AutoModelForCausalLM.from_pretrained(policy.model_path)
    groups = letter_groups(policy.processor, version=3)
    groups[1].trajectories[0].turns = []  # it has no sample
    metrics = policy.train_step(groups, read, version=5)
    assert policy.tokens is not None
    record = trained_groups([group.id for group in groups], policy.tokens, policy.step, 5)
    out: dict[str, Any] = {"record": record, "metrics": metrics, "ids": [[t.id for t in g.trajectories] for g in groups]}
    logprobs, entropy, advantages, gaps = [], [], [], []
    for group in groups:
        for values, trajectory in zip(group_advantages(group, policy.algorithm), group.trajectories, strict=True):
            for sample in trajectory.samples():
                with torch.no_grad():
                    rows = torch.log_softmax(reference(torch.tensor([sample.ids])).logits[0, :-1], -1)
                trained = [i for i, mask in enumerate(sample.loss_mask) if mask]
                at = torch.tensor(trained) - 1
                own = rows[at, torch.tensor(sample.ids)[trained]].numpy()
                logprobs.append(own)
                entropy.append(-(rows.exp() * rows).sum(-1)[at].numpy())
                advantages.append(np.array([values[sample.turn[i]] for i in trained], np.float32))
                gaps.append(np.abs(own - np.array(sample.logprobs)[trained]))
    return out | {"logprobs": logprobs, "entropy": entropy, "advantages": advantages, "gaps": gaps}


@pytest.mark.parametrize("settings", [{}, dict(old_logprobs="recompute", updates_per_batch=2)])
def test_each_token_has_what_the_step_computed_for_it(worker: Worker, settings: dict[str, Any]) -> None:
    got = worker.run(told, settings)
    members = [[member.id for member in group.trajectories] for group in got["record"]]
    assert members == [ids[1:] if index == 1 else ids for index, ids in enumerate(got["ids"])], (
        "but for the one without a sample"
    )
    trajectories = [member for group in got["record"] for member in group.trajectories]
    samples = [sample for member in trajectories for sample in member.samples]
    assert {(group.step, group.version) for group in got["record"]} == {(1, 5)}
    for name, within in (("logprobs", 3e-6), ("advantages", 1e-6)):
        for sample, theirs in zip(samples, got[name], strict=True):
            np.testing.assert_allclose(getattr(sample, name), theirs, atol=within)
    if not settings:  # with two updates the second half is seen after the first
        for sample, theirs in zip(samples, got["entropy"], strict=True):
            np.testing.assert_allclose(sample.entropy, theirs, atol=3e-6)
    assert all(sample.logprobs.dtype == np.float32 for sample in samples)
    assert trajectories[0].gap == pytest.approx(float(got["gaps"][0].mean()), abs=3e-6)
    assert trajectories[0].advantage == pytest.approx(float(got["advantages"][0].mean()), abs=1e-6)
    flat = np.concatenate(got["gaps"])
    assert got["metrics"]["logprob_gap_mean"] == pytest.approx(float(flat.mean()), abs=3e-6)


def seen_late() -> tuple[int, int, bool]:
    """Two updates without a forward before the first: known, unknown, and whether the metrics leave out what is unknown."""
    policy = make_policy(TEXT, eps=1e-3, token_budget=100, updates_per_batch=2, lr=1.0, warmup_steps=0)
    metrics = policy.train_step(letter_groups(policy.processor), read, 0)
    assert policy.tokens is not None
    known = np.isfinite(policy.tokens.logprobs)
    return int(known.sum()), int((~known).sum()), bool(np.isfinite(metrics["logprob_gap_mean"]))


def test_what_was_seen_only_after_an_update_has_no_logprob_of_before(worker: Worker) -> None:
    known, unknown, finite = worker.run(seen_late)
    assert known and unknown and finite


def by_modality() -> tuple[dict[str, float], dict[str, float]]:
    """The gaps that a step tells, and those of its samples put together by their media."""
    policy = make_policy(OMNI, eps=1e-3)
    metrics = policy.train_step(letter_groups(policy.processor, seed=0), read, 1)
    tokens = policy.tokens
    assert tokens is not None
    parts: dict[str, list[np.ndarray]] = {}
    for sample, gap in zip(tokens.collected.samples, tokens.by_sample(tokens.gap), strict=True):
        for kind in {ref.kind for ref in sample.media} or {"text"}:
            parts.setdefault(kind, []).append(gap)
    known = {kind: float(np.concatenate(gaps).mean()) for kind, gaps in parts.items()}
    return {k: v for k, v in metrics.items() if k.startswith("logprob_gap_") and k[12:] not in ("mean", "max")}, known


def test_the_gap_is_told_by_modality(worker: Worker) -> None:
    metrics, known = worker.run(by_modality)
    assert metrics == pytest.approx({f"logprob_gap_{kind}": gap for kind, gap in known.items()}) and len(known) >= 3


def one_step(rank: int, layout: LayoutConfig, meeting: Path) -> list[np.ndarray]:
    begin(rank, layout, meeting)
    policy = make_policy(OMNI, token_budget=64, eps=1e-3)
    policy.train_step(letter_groups(policy.processor), read, 1)
    assert policy.tokens is not None
    return [policy.tokens.logprobs, policy.tokens.entropy, policy.tokens.advantages]


def test_each_of_two_ranks_has_the_tokens_of_both(ranks: Ranks) -> None:
    (one,) = ranks.run(LayoutConfig(), one_step)
    for values in ranks.run(LayoutConfig(dp=2), one_step):
        for ours, theirs in zip(one, values, strict=True):
            assert np.isfinite(theirs).all()
            np.testing.assert_allclose(theirs, ours, atol=3e-6)
