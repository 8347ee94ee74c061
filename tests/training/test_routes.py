"""Route replay: the experts that the engine recorded are the ones the trainer uses."""

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
    small_model,
)

from relax_sdk.errors import TrainingError
from relax_sdk.trajectory import Group, Trajectory

OMNI = "relax/tiny-omni"
LAYERS, EXPERTS, TOP_K = 3, 4, 2


def two_turns(processor: Any, seed: int, missing: bool = False) -> Trajectory:
    """An episode of two turns with random routes; the first turn's hold where both turns computed a token."""
    rng = np.random.default_rng(seed)

    def routes(n: int) -> dict[str, Any]:
        experts = rng.random((n, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int32)
        return dict(routed_experts=experts.tobytes(), routed_shape=list(experts.shape))

    first, media = prompt(processor, "image", "first?")
    said = answer(processor, "A")
    given, _ = append(processor, "second?")
    second = first + said + given
    reply = answer(processor, "CD")
    turns = [
        make_turn(first, said, media, **routes(len(first) + len(said) - 1)),
        make_turn(second, reply, media, **({} if missing else routes(len(second) + len(reply) - 1))),
    ]
    return make_trajectory(turns, float(seed), seed, size=2)


def used_routes(recompute: bool, missing: bool) -> dict[str, Any]:
    """Routes of every token in a training step, and those that were recorded."""
    import torch
    from megatron.core.transformer.moe import router as router_module
    from relax_server.training.routes import sample_routes

    policy = make_policy(OMNI, replay_routes=True, recompute=recompute, share_prompts=False)
    trajectories = [two_turns(policy.processor, i, missing) for i in range(2)]
    group = Group("g", "e", 0, trajectories)
    seen: list[np.ndarray] = []
    original = router_module.TopKRouter.routing

    def spy(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = original(self, logits, *args, **kwargs)
        seen.append(routing_map.detach().cpu().numpy().copy())
        return probs, routing_map

    router_module.TopKRouter.routing = spy  # type: ignore[method-assign]
    try:
        metrics = policy.train_step([group], read, 0)
    finally:
        router_module.TopKRouter.routing = original  # type: ignore[method-assign]
    wanted = [sample_routes(t, t.samples()[0]) for t in trajectories]
    return {"seen": seen, "wanted": wanted, "loss": metrics["loss"], "tokens": metrics["forest_tokens"]}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("missing", [False, True])
def test_recorded_routes_are_used(worker, recompute, missing):
    got = worker.run(used_routes, recompute, missing)
    seen = got["seen"]
    assert len(seen) == LAYERS * (2 if recompute else 1)  # the layers are computed twice
    if recompute:  # backward goes through the layers from the last to the first
        for layer in range(LAYERS):
            np.testing.assert_array_equal(seen[layer], seen[2 * LAYERS - 1 - layer])
    lengths = [len(w) - 1 for w in got["wanted"]]
    assert sum(lengths) == got["tokens"] == len(seen[0])
    # samples lie one after the other in the order of their ids, which are equal here, so either may come first
    orders = []
    for order in ([0, 1], [1, 0]):
        wanted = np.concatenate([got["wanted"][i][: lengths[i]] for i in order])
        known = (wanted >= 0).all((1, 2))
        matches = []
        for layer in range(LAYERS):
            used = np.zeros((len(wanted), EXPERTS), bool)
            np.put_along_axis(used, np.where(wanted[:, layer] < 0, 0, wanted[:, layer]), True, 1)
            matches.append((used[known] == seen[layer][known]).all())
            assert (seen[layer].sum(1) == TOP_K).all()
        orders.append(all(matches))
        assert known.all() != missing
    assert any(orders)
    assert np.isfinite(got["loss"])


def replayed_own_routes() -> float:
    """Replaying the routes that the trainer itself takes changes nothing."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter

    policy = make_policy(OMNI, replay_routes=True)
    trajectory = two_turns(policy.processor, 0, missing=True)
    for turn in trajectory.turns:
        turn.routed_experts = None
    (sample,) = trajectory.samples()
    taken: list[torch.Tensor] = []
    original = TopKRouter.routing

    def spy(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = original(self, logits, *args, **kwargs)
        taken.append(routing_map.float().topk(TOP_K).indices)
        return probs, routing_map

    TopKRouter.routing = spy  # type: ignore[method-assign]
    try:
        (plain,) = policy.logprobs([sample], read)
    finally:
        TopKRouter.routing = original  # type: ignore[method-assign]
    experts = np.stack([x.cpu().numpy().astype(np.int32) for x in taken], 1)
    last = trajectory.turns[1]
    last.routed_experts, last.routed_shape = experts.tobytes(), list(experts.shape)
    assert len(experts) == len(last.prompt_ids) + len(last.response_ids) - 1
    trajectory.turns[0].reward = trajectory.reward = 1.0
    last.response_logprobs = plain[2:].tolist()
    trajectory.turns[0].response_logprobs = plain[:2].tolist()
    return policy.train_step([Group("g", "e", 0, [trajectory])], read, 0)["logprob_gap_max"]


def test_replaying_the_trainers_own_routes_changes_nothing(worker):
    assert worker.run(replayed_own_routes) < 1e-6


def wrong_shape() -> None:
    policy = make_policy(OMNI, replay_routes=True)
    trajectory = two_turns(policy.processor, 0)
    turn = trajectory.turns[1]
    assert turn.routed_shape is not None
    turn.routed_shape = [turn.routed_shape[0] - 1, *turn.routed_shape[1:]]
    policy.train_step([Group("g", "e", 0, [trajectory])], read, 0)


def test_routes_that_do_not_cover_their_turn_are_refused(worker):
    with pytest.raises(TrainingError, match="do not cover"):
        worker.run(wrong_shape)


def wrong_model() -> None:
    policy = make_policy(OMNI, replay_routes=True)
    trajectory = two_turns(policy.processor, 0)
    for turn in trajectory.turns:
        assert turn.routed_experts is not None and turn.routed_shape is not None
        routes = np.frombuffer(turn.routed_experts, np.int32).reshape(turn.routed_shape)[:, :2]
        turn.routed_experts, turn.routed_shape = routes.tobytes(), list(routes.shape)
    policy.train_step([Group("g", "e", 0, [trajectory])], read, 0)


def test_routes_of_another_model_are_refused(worker):
    with pytest.raises(TrainingError, match="2 layers with 2 experts a token, but this model has 3 with 2"):
        worker.run(wrong_model)


# ------------------------------------------------------------------------------------ beside other models, after a restart


def routed_groups(processor: Any, seed: int, n_groups: int = 2, dense: tuple[int, ...] = ()) -> list[Group]:
    """Groups of one-turn episodes with random routes as engines record them: every decoder layer, zeros where it is dense."""
    rng = np.random.default_rng(seed)
    groups = letter_groups(processor, n_groups, size=4, seed=seed)
    for trajectory in (t for group in groups for t in group.trajectories):
        turn = trajectory.turns[0]
        n = len(turn.prompt_ids) + len(turn.response_ids) - 1
        routes = rng.random((n, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int32)
        routes[:, list(dense)] = 0
        turn.routed_experts, turn.routed_shape = routes.tobytes(), list(routes.shape)
    return groups


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("seconds")}


def interrupted(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A run with a warm-up, a reference and route replay, in one go and from its checkpoint."""

    def begin() -> Any:
        return make_policy(OMNI, replay_routes=True, kl_coef=0.03, lr=2e-3, **settings)

    def step(policy: Any, i: int) -> dict[str, float]:
        return timeless(policy.train_step(routed_groups(policy.processor, i), read, i))

    whole = begin()
    whole.warmup_step([conversation(whole.processor, [(["audio", "which?"], "A")])], read, 2e-3)
    whole.end_warmup()
    whole.export(folder / "reference")
    for i in range(2):
        step(whole, i)
    whole.save(folder / "2", {})
    rest = [step(whole, i) for i in range(2, 4)]
    resumed = begin()
    resumed.load_reference(folder / "reference")  # as a restarted trainer does
    resumed.load(folder / "2")
    again = [step(resumed, i) for i in range(2, 4)]
    return {
        "metrics": rest == again,
        "weights": largest_difference(parameters(whole), parameters(resumed)),
        "kl": again[-1]["kl"],
    }


@pytest.mark.parametrize("recompute", [False, True])
def test_replay_with_a_reference_goes_on_after_a_restart(worker, tmp_path, recompute):
    got = worker.run(interrupted, tmp_path, {"recompute": recompute})
    assert got["metrics"]
    assert got["weights"] == 0
    assert got["kl"] > 0


def beside_another() -> float:
    """Steps of one policy before and after a second one is built in the same process."""
    alone, beside = (make_policy(OMNI, replay_routes=True, recompute=True) for _ in range(2))
    alone.train_step(routed_groups(alone.processor, 0), read, 0)
    beside.train_step(routed_groups(beside.processor, 0), read, 0)
    make_policy(OMNI, replay_routes=False)
    alone.train_step(routed_groups(alone.processor, 1), read, 1)
    beside.train_step(routed_groups(beside.processor, 1), read, 1)
    return largest_difference(parameters(alone), parameters(beside))


def test_models_of_one_process_share_no_routes(worker):
    assert worker.run(beside_another) == 0


def with_dense_layers(folder: Path, dense: list[int], recompute: bool) -> dict[str, Any]:
    """A step on a model that has dense layers among its mixtures of experts, and the experts that were used."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter
    from relax_server.models.catalog import resolve_model
    from transformers import AutoTokenizer

    shape = dict(head_dim=16, num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=32, mlp_only_layers=dense)
    path = small_model(folder, "Qwen3Moe", vocab_size=268, eos_token_id=2, pad_token_id=0, **shape)
    AutoTokenizer.from_pretrained(resolve_model("relax/tiny-llama")).save_pretrained(path)
    policy = make_policy(path, replay_routes=True, recompute=recompute, share_prompts=False)
    groups = routed_groups(policy.processor, 0, dense=tuple(dense))
    seen: dict[int, np.ndarray] = {}
    original = TopKRouter.routing

    def spy(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = original(self, logits, *args, **kwargs)
        seen[self.layer_number - 1] = routing_map.cpu().numpy().copy()
        return probs, routing_map

    TopKRouter.routing = spy  # type: ignore[method-assign]
    try:
        policy.train_step(groups, read, 0)
    finally:
        TopKRouter.routing = original  # type: ignore[method-assign]
    turns = [t.turns[0] for g in groups for t in g.trajectories]
    wanted = np.concatenate([np.frombuffer(t.routed_experts, np.int32).reshape(t.routed_shape) for t in turns])
    by_token = lambda rows: sorted(map(tuple, rows.tolist()))  # trees are packed in an order of their own
    used = {layer: by_token(rows) for layer, rows in seen.items()}
    maps = {}
    for layer in seen:
        chosen = np.zeros((len(wanted), EXPERTS), bool)
        np.put_along_axis(chosen, wanted[:, layer], True, 1)
        maps[layer] = by_token(chosen)
    return {"layers": sorted(seen), "equal": used == maps}


@pytest.mark.parametrize(("dense", "recompute"), [([1], False), ([1], True), ([0, 2], False)])
def test_dense_layers_have_no_routes(worker, tmp_path, dense, recompute):
    got = worker.run(with_dense_layers, tmp_path, dense, recompute)
    assert got["layers"] == [layer for layer in range(LAYERS) if layer not in dense]
    assert got["equal"]


def gradients(recompute: bool, budget: int) -> dict[str, np.ndarray]:
    """Gradients of one step with routes, pictures, sounds and films, by parameter."""
    policy = make_policy(OMNI, replay_routes=True, recompute=recompute, token_budget=budget)
    policy.train_step(routed_groups(policy.processor, 0, n_groups=3), read, 0)
    return {name: p.main_grad.cpu().numpy().copy() for name, p in policy._loaded.model.named_parameters()}


def test_recomputed_layers_have_the_same_gradients(worker):
    plain = worker.run(gradients, False, 64)
    again = worker.run(gradients, True, 64)
    scale = max(float(np.abs(g).max()) for g in plain.values())
    assert scale > 0 and plain.keys() == again.keys()
    for name, gradient in plain.items():
        assert np.abs(gradient - again[name]).max() <= 1e-6 * scale, name
    visual = [name for name in plain if name.startswith("visual.merger_list")]
    assert any(np.abs(plain[name]).max() > 0 for name in visual), "DeepStack's features have gradients"


# ------------------------------------------------------------------------------------------------------- the reference


def reference_with_routes() -> dict[str, Any]:
    """A first step whose recorded routes are not those that the model would take, with a reference here and in a role."""
    from relax_server.training.group_fields import Given, advantages_field
    from relax_server.training.model import LogprobModel

    settings: dict[str, Any] = dict(replay_routes=True, kl_coef=0.03)
    own, given, plain = (make_policy(OMNI, **s) for s in (settings, settings | {"own_reference": False}, {}))
    groups = routed_groups(own.processor, 0)
    samples = [sample for group in groups for t in group.trajectories for sample in t.samples()]
    expected = np.concatenate(plain.logprobs(samples, read))
    role = LogprobModel(own.model_path, training=own.training, seed=0)
    fields = role.group_logprobs(groups, read)
    advantages = [advantages_field(g, own.algorithm) for g in groups]
    return {
        "role": float(np.abs(np.concatenate(fields) - expected).max()),
        "own": own.train_step(groups, read, 0),
        "given": given.train_step(groups, read, 0, Given(advantages, fields)),
    }


def test_the_reference_takes_routes_of_its_own(worker):
    got = worker.run(reference_with_routes)
    assert got["role"] < 1e-6
    assert got["own"]["kl"] > 1e-6, "the weights are equal, the routes are not"
    for name in ("kl", "loss", "grad_norm"):
        assert got["own"][name] == pytest.approx(got["given"][name], rel=1e-4), name
