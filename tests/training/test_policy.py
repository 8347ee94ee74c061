"""The policy on real models: one training step against the same step with transformers and torch, and what it reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training_data import (
    answer,
    append,
    conversation,
    largest_difference,
    letter_groups,
    make_policy,
    make_trajectory,
    make_turn,
    parameters,
    prompt,
    read,
)

from relax_sdk import ConfigError, TokenError
from relax_sdk.config import SamplingParams
from relax_sdk.errors import TrainingError
from relax_sdk.trajectory import Group

OMNI, TEXT = "relax/tiny-omni", "relax/tiny-qwen3"


# --------------------------------------------------------------------------------------- one step against plain torch


def step_with_torch(settings: dict[str, Any], temperature: float) -> dict[str, float]:
    """A training step of the policy, and the same step written out with transformers and torch.optim.AdamW, one sequence
    after the other; returns the differences."""
    import torch
    from relax_server.training.algorithms import grpo
    from transformers import AutoModelForCausalLM

    policy = make_policy(TEXT, sampling=SamplingParams(temperature=temperature), eps=1e-3, token_budget=100, **settings)
    reference = AutoModelForCausalLM.from_pretrained(policy.model_path)
    groups = letter_groups(policy.processor, version=3)
    groups[0].trajectories[0].turns = []  # it has no sample, but its reward still counts
    got = policy.train_step(groups, read, version=5)

    optimizer = torch.optim.AdamW(reference.parameters(), lr=5e-4 / 20, betas=(0.9, 0.99), eps=1e-3, weight_decay=0.0)
    losses, entropies, gaps, n = [], [], [], 0
    for group in groups:
        advantages = grpo(torch.tensor([t.reward for t in group.trajectories], dtype=torch.float64))
        for advantage, trajectory in zip(advantages.tolist(), group.trajectories, strict=True):
            for turn in trajectory.turns:
                logits = reference(torch.tensor([turn.prompt_ids + turn.response_ids])).logits[0] / temperature
                rows = torch.log_softmax(logits[len(turn.prompt_ids) - 1 : -1], -1)
                new = rows.gather(1, torch.tensor(turn.response_ids)[:, None])[:, 0]
                engine = torch.tensor(turn.response_logprobs)
                recompute = settings.get("old_logprobs") == "recompute"
                old = new.detach() if recompute else engine
                weight = (new.detach() - engine).exp().clamp(max=2.0) if recompute else torch.ones_like(new)
                ratio = (new - old).exp()
                token = -weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
                entropy = -(rows.exp() * rows).sum(-1)
                losses.append((token - 0.01 * entropy).sum())
                entropies.append(entropy.sum().item())
                gaps += (new.detach() - engine).abs().tolist()
                n += len(new)
    loss = sum(losses) / n
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    optimizer.step()
    theirs = {k: v.detach().numpy() for k, v in reference.state_dict().items()}
    return {
        "weights": largest_difference(parameters(policy), theirs),
        "loss": got["loss"] - loss.item(),
        "grad_norm": got["grad_norm"] / norm.item() - 1,
        "entropy": got["entropy"] - sum(entropies) / n,
        "gap mean": got["logprob_gap_mean"] - float(np.mean(gaps)),
        "gap max": got["logprob_gap_max"] - max(gaps),
        "tokens": got["n_response_tokens"] - n,
        "staleness": got["token_staleness_mean"] - 2,
        "several forests": min(0.0, got["forests"] - 2),
    }


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        ({}, 1.0),
        ({}, 0.7),
        (dict(old_logprobs="recompute"), 1.0),
        (dict(share_prompts=False), 1.0),
        (dict(recompute=True), 1.0),
        (dict(recompute="selective"), 1.0),
    ],
)
def test_a_step_is_the_one_written_out(worker, settings, temperature):
    differences = worker.run(step_with_torch, settings, temperature)
    assert max(map(abs, differences.values())) < 3e-6, differences


# ----------------------------------------------------------------------------------------- budget, sharing, modalities


def steps(name: str, n: int, settings: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, np.ndarray]]:
    policy = make_policy(name, eps=1e-3, **settings)
    metrics = [policy.train_step(letter_groups(policy.processor, seed=i), read, i) for i in range(n)]
    return metrics, parameters(policy)


@pytest.mark.parametrize(
    "settings", [dict(token_budget=64), dict(share_prompts=False), dict(recompute=True), dict(experts="grouped")]
)
def test_how_a_batch_is_computed_does_not_change_the_step(worker, settings):
    (one, *_), weights = worker.run(steps, OMNI, 2, {})
    (other, *_), others = worker.run(steps, OMNI, 2, settings)
    assert largest_difference(weights, others) < 2e-6
    assert other["loss"] == pytest.approx(one["loss"], abs=1e-6)
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert one["forest_tokens"] < one["padded_tokens"] / 3
    assert (one["shared"], one["forests"]) == (1, 1)
    if "token_budget" in settings:
        assert other["forests"] > 2
    if "share_prompts" in settings:
        assert other["shared"] == 0
        assert other["forest_tokens"] > 3 * one["forest_tokens"]


def lonely_modalities() -> list[float]:
    policy = make_policy(OMNI)
    losses = []
    for parts in (["words only"], ["image", "which?"], ["audio", "which?"], ["video", "which?"], ["words again"]):
        ids, media = prompt(policy.processor, *parts)
        turns = [make_turn(ids, answer(policy.processor, a), media) for a in "AB"]
        group = Group("g", "e", 0, [make_trajectory([turn], float(i), i, size=2) for i, turn in enumerate(turns)])
        losses.append(policy.train_step([group], read, 0)["loss"])
    return losses


def test_a_batch_may_lack_any_modality(worker):
    assert np.isfinite(worker.run(lonely_modalities)).all()


# ------------------------------------------------------------------------------------------------------ the algorithm


def gradient_directions(credit: str) -> list[float]:
    """How the logprobs of two turns of two episodes change in one step."""
    policy = make_policy(TEXT, credit=credit, advantage="dr_grpo", entropy_coef=0.0, lr=1e-3, warmup_steps=0)
    p = policy.processor
    first, _ = prompt(p, "first?")
    trajectories = []
    # Both earn 1 in all; the first episode in its first turn, the second in its second.
    for i, (letters, rewards) in enumerate([("AB", (1.0, 0.0)), ("CD", (0.0, 1.0))]):
        given, _ = append(p, "second?")
        one = make_turn(first, answer(p, letters[0]), [], reward=rewards[0])
        two = make_turn(first + one.response_ids + given, answer(p, letters[1]), [], reward=rewards[1])
        trajectories.append(make_trajectory([one, two], 1.0, i, size=2))
    samples = [s for t in trajectories for s in t.samples()]
    before = policy.logprobs(samples, read)
    for t, logprobs in zip(trajectories, before, strict=True):
        t.turns[0].response_logprobs, t.turns[1].response_logprobs = logprobs[:2].tolist(), logprobs[2:].tolist()
    metrics = policy.train_step([Group("g", "e", 0, trajectories)], read, 0)
    after = policy.logprobs(samples, read)
    return [float(x) for a, b in zip(after, before, strict=True) for x in (a - b)[[0, 2]]] + [metrics["logprob_gap_max"]]


def test_credit_by_turn(worker):
    _, b, _, d, gap = worker.run(gradient_directions, "turn")
    # In the first turn both still have 1 to come; in the second only the second episode earns.
    assert b < -1e-4 < 1e-4 < d
    assert gap < 1e-5
    assert worker.run(gradient_directions, "trajectory")[:4] == [0, 0, 0, 0]


def several_updates() -> tuple[dict[str, float], dict[str, float]]:
    one = make_policy(TEXT)
    many = make_policy(TEXT, updates_per_batch=3)
    groups = letter_groups(one.processor)
    return one.train_step(groups, read, 0), many.train_step(groups, read, 0)


def test_several_updates_on_one_batch(worker):
    one, many = worker.run(several_updates)
    assert (one["updates"], many["updates"]) == (1, 3)
    assert one["n_response_tokens"] == many["n_response_tokens"]
    assert many["entropy"] != one["entropy"]


def with_reference() -> list[dict[str, float]]:
    policy = make_policy(TEXT, kl_coef=0.5, lr=2e-3, warmup_steps=0)
    return [policy.train_step(letter_groups(policy.processor, seed=i), read, i) for i in range(4)]


def test_the_reference_stays_where_the_run_began(worker):
    metrics = worker.run(with_reference)
    assert metrics[0]["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[3]["kl"] > 1e-3
    assert all(m["kl"] >= 0 for m in metrics)


def edge_batches() -> dict[str, Any]:
    policy = make_policy(TEXT, entropy_coef=0.0)
    groups = letter_groups(policy.processor, 3)
    for t in groups[1].trajectories:
        t.reward = 0.5
    for i, t in enumerate(groups[2].trajectories):
        t.turns = [] if i else t.turns
    out: dict[str, Any] = {"metrics": policy.train_step(groups, read, 0)}
    before = parameters(policy)
    equal = [g for g in groups if g.id == "g1"]
    fresh = make_policy(TEXT, entropy_coef=0.0)
    start = parameters(fresh)
    out["no variance"] = (fresh.train_step(equal, read, 0)["grad_norm"], largest_difference(start, parameters(fresh)))
    for t in groups[0].trajectories:
        t.turns = []
    try:
        policy.train_step(groups[:1], read, 0)
    except TrainingError as error:
        out["empty"] = str(error)
    out["unchanged"] = largest_difference(before, parameters(policy))
    return out


def test_failed_episodes_and_groups_that_teach_nothing(worker):
    got = worker.run(edge_batches)
    assert got["metrics"]["zero_variance_groups"] == 1
    assert got["metrics"]["n_samples"] == 6 + 6 + 1
    assert got["no variance"] == (0, 0)
    assert "no" in got["empty"] and "token to train on" in got["empty"]
    assert got["unchanged"] == 0


def impossible_logprobs(value: float) -> tuple[dict[str, float], float]:
    """A step on tokens that the engine says it sampled with an absurd logprob."""
    policy = make_policy(TEXT)
    groups = letter_groups(policy.processor)
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.turns[0].response_logprobs[0] = value
    before = parameters(policy)
    metrics = policy.train_step(groups, read, 0)
    return metrics, largest_difference(before, parameters(policy))


def test_an_absurd_logprob_does_not_spoil_the_weights(worker):
    metrics, moved = worker.run(impossible_logprobs, -1e5)
    assert all(np.isfinite(list(metrics.values())))
    assert 0 < moved < 1
    assert metrics["logprob_gap_max"] > 9e4


def gradient_with_a_token_off(nats: float) -> float:
    """Norm of the gradient of a batch in which the first token of every worse answer is `nats` likelier than when sampled."""
    policy = make_policy(TEXT, entropy_coef=0.0)
    groups = letter_groups(policy.processor)
    samples = [t.samples()[0] for g in groups for t in g.trajectories]
    logprobs = iter(policy.logprobs(samples, read))
    for group in groups:
        for trajectory in group.trajectories:
            own = next(logprobs).tolist()
            own[0] -= nats * (trajectory.reward == 0)
            trajectory.turns[0].response_logprobs = own
    return policy.train_step(groups, read, 0)["grad_norm"]


@pytest.mark.parametrize("nats", [15.0, 20.0])
def test_tokens_far_off_do_not_multiply_the_gradient(worker, nats):
    usual, off = worker.run(gradient_with_a_token_off, 0.0), worker.run(gradient_with_a_token_off, nats)
    assert 0 < off < 3 * usual


def poisoned_weights() -> tuple[str, float]:
    import torch

    policy = make_policy(TEXT)
    before = parameters(policy)
    hook = policy._loaded.model.gpt.decoder.register_forward_hook(lambda m, a, out: out * torch.nan)
    try:
        policy.train_step(letter_groups(policy.processor), read, 0)
    except TrainingError as error:
        return str(error), largest_difference(before, parameters(policy))
    finally:
        hook.remove()
    return "", 0.0


def test_a_gradient_that_is_not_finite_is_not_applied(worker):
    message, moved = worker.run(poisoned_weights)
    assert "not finite" in message
    assert moved == 0


def banned_response() -> None:
    policy = make_policy(OMNI)
    ids, _ = prompt(policy.processor, "words")
    turn = make_turn(ids, [policy.processor.banned_ids[0], policy.processor.eos_ids[0]], [])
    policy.train_step([Group("g", "e", 0, [make_trajectory([turn], 1.0)])], read, 0)


def test_tokens_that_cannot_be_sampled_are_refused(worker):
    with pytest.raises(TokenError, match="never be sampled"):
        worker.run(banned_response)


# -------------------------------------------------------------------------------------- warm-up, logprobs, weights out


def learn_a_format() -> tuple[list[float], list[int]]:
    policy = make_policy(OMNI, eps=1e-8)
    samples = [
        conversation(policy.processor, [(["audio", "which?"], "A")]),
        conversation(policy.processor, [(["image", "x"], "BB")]),
    ]
    losses = [policy.warmup_step(samples, read, lr=2e-3) for _ in range(25)]
    logprobs = policy.logprobs(samples, read)
    expected = -float(np.concatenate(logprobs).mean())
    return [*losses, policy.warmup_step(samples, read, lr=0.0) - expected, policy.step], [len(x) for x in logprobs]


def test_warm_up(worker):
    (*losses, difference, step), lengths = worker.run(learn_a_format)
    assert losses[0] == pytest.approx(np.log(266), rel=0.1)
    assert losses[-1] < losses[0] / 3
    assert difference == pytest.approx(0, abs=1e-5)
    assert step == 0
    assert lengths == [2, 3]


def reference_after_warmup(folder: Path) -> dict[str, list[float]]:
    settings: dict[str, Any] = dict(kl_coef=0.5, lr=2e-3, warmup_steps=0)
    policy = make_policy(OMNI, **settings)
    samples = [conversation(policy.processor, [(["audio", "which?"], "A")])]
    for _ in range(5):
        policy.warmup_step(samples, read, lr=2e-3)
    policy.end_warmup()
    policy.export(folder / "reference")
    first = policy.train_step(letter_groups(policy.processor, seed=0), read, 0)["kl"]
    policy.save(folder / "checkpoint", {})
    second = policy.train_step(letter_groups(policy.processor, seed=1), read, 1)["kl"]
    resumed: dict[bool, float] = {}
    for given in (True, False):
        other = make_policy(OMNI, **settings)
        if given:
            other.load_reference(folder / "reference")
        other.load(folder / "checkpoint")
        resumed[given] = other.train_step(letter_groups(policy.processor, seed=1), read, 1)["kl"]
    return {"first": [first], "second": [second, resumed[True], resumed[False]]}


def test_the_reference_is_what_the_warm_up_made_of_the_model(worker, tmp_path):
    got = worker.run(reference_after_warmup, tmp_path)
    assert got["first"][0] == pytest.approx(0, abs=1e-6)
    uninterrupted, resumed, without = got["second"]
    assert uninterrupted == resumed > 1e-4
    assert abs(without - uninterrupted) > 1e-2


def exported(folder: Path) -> dict[str, Any]:
    import torch
    from relax_server.models.processor import Processor
    from training_data import features_of, hf_omni_logits
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    policy = make_policy(OMNI, lr=5e-3, warmup_steps=0)
    policy.train_step(letter_groups(policy.processor), read, 0)
    policy.export(folder / "whole")
    (folder / "weights").mkdir()
    policy.export_weights(folder / "weights")
    model = Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(folder / "whole").eval()
    processor = Processor.load(folder / "whole")
    ids, media = prompt(processor, "video", "and", "image", "long", "?")
    said = answer(processor, "yes")
    logits = hf_omni_logits(model, ids + said, features_of(processor, media))
    logits[:, list(processor.banned_ids)] = -torch.inf
    theirs = torch.log_softmax(logits[len(ids) - 1 : -1], -1).gather(1, torch.tensor(said)[:, None])[:, 0]
    sample = conversation(processor, [(["video", "and", "image", "long", "?"], "yes")])
    (ours,) = policy.logprobs([sample], read)
    again = make_policy(folder / "whole")
    return {
        "logprobs": float(np.abs(theirs.numpy() - ours).max()),
        "files": sorted(f.name for f in (folder / "weights").iterdir()),
        "same": (folder / "weights" / "model.safetensors").read_bytes()
        == (folder / "whole" / "model.safetensors").read_bytes(),
        "again": largest_difference(parameters(policy), parameters(again)),
    }


def test_exported_folders_are_read_by_transformers(worker, tmp_path):
    got = worker.run(exported, tmp_path)
    assert got["logprobs"] < 1e-5
    assert got["files"] == ["model.safetensors"]
    assert got["same"]
    assert got["again"] == 0


def bfloat16(path: str) -> tuple[np.ndarray, str]:
    policy, single = make_policy(path, dtype="bfloat16"), make_policy(path)
    samples = [s for g in letter_groups(single.processor) for t in g.trajectories for s in t.samples()]
    pairs = zip(single.logprobs(samples, read), policy.logprobs(samples, read), strict=True)
    gaps = np.concatenate([np.abs(a - b) for a, b in pairs])
    policy.train_step(letter_groups(policy.processor), read, 0)
    return gaps, str(next(policy._loaded.model.parameters()).dtype)


@pytest.mark.parametrize("path", [TEXT, OMNI])
def test_bfloat16(worker, path):
    gaps, dtype = worker.run(bfloat16, path)
    assert dtype == "torch.bfloat16"
    assert 0 < gaps.mean() < 0.03
    assert path == OMNI or gaps.max() < 0.1  # experts: where two are nearly tied, rounding takes the other one


def test_settings_that_cannot_be(worker):
    with pytest.raises(ConfigError, match="temperature"):
        worker.run(make_policy_at_zero)
    with pytest.raises(ConfigError, match="replay_routes"):
        worker.run(make_policy_replaying_text)


def make_policy_at_zero() -> None:
    make_policy(TEXT, sampling=SamplingParams(temperature=0.0))


def make_policy_replaying_text() -> None:
    make_policy(TEXT, replay_routes=True)
