"""Route replay: the experts that the engine recorded are the ones the trainer uses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from training_data import answer, append, make_policy, make_trajectory, make_turn, prompt, read

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
    from relax_server.training.megatron.routes import sample_routes

    policy = make_policy(OMNI, replay_routes=True, recompute=recompute, share_prompts=False)
    trajectories = [two_turns(policy.processor, i, missing) for i in range(2)]
    group = Group("g", "e", 0, trajectories)
    seen: list[np.ndarray] = []
    original = router_module.TopKRouter.routing

    def spy(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = original(self, logits, *args, **kwargs)
        seen.append(routing_map.detach().numpy().copy())
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
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    policy = make_policy(OMNI, replay_routes=True)
    trajectory = two_turns(policy.processor, 0, missing=True)
    for turn in trajectory.turns:
        turn.routed_experts = None
    (sample,) = trajectory.samples()
    original = RouterReplay.clear_global_router_replay_action
    RouterReplay.clear_global_router_replay_action = staticmethod(
        lambda: RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    )
    try:
        (plain,) = policy.logprobs([sample], read)
        recorded = [r.numpy().astype(np.int32) for r in RouterReplay.get_recorded_data()]
    finally:
        RouterReplay.clear_global_router_replay_action = original
    experts = np.stack(recorded, 1)
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
