"""The format warm-up: what its episodes hold, and what of the environment it never asks."""

from __future__ import annotations

from typing import Any

from relax_server.rollout.warmup import make_warmup

import relax_sdk as relax
from relax_sdk.trajectory import derive_seed


class Letters(relax.Env):
    """Two turns, each answered with one letter; `format_example` needs what `reset` sets."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn, self.allowed = 0, ["x", "y"]
        return f"task {options['task']['index']}", {}

    def step(self, action):
        self.turn += 1
        return f"turn {self.turn}", 0.5, self.turn == 2, False, {}

    def format_example(self, rng) -> Any:
        return f"{self.allowed[rng.integers(2)]}{self.turn}"


async def warmed_up(made, groups: int = 1, batch_size: int = 2):
    """The trajectories of a warm-up, as the journal has them."""
    assert await make_warmup(made.worker, groups, batch_size) == groups
    return [t for group in made.journal.groups("run", "warmup") for t in group.trajectories]


async def test_a_warm_up_holds_well_formed_answers_at_every_turn(bench, processor):
    made = bench(Letters)
    trajectories = await warmed_up(made)
    assert len(trajectories) == 2
    for index, trajectory in enumerate(trajectories):
        assert trajectory.seed == derive_seed(0, "warmup", index)
        answers = [m["content"] for m in trajectory.messages if m["role"] == "assistant"]
        assert [a[1:] for a in answers] == ["0", "1"] and {a[0] for a in answers} <= {"x", "y"}
        assert [processor.decode(t.response_ids) for t in trajectory.turns] == [f"{a}<|im_end|>" for a in answers]
        assert len(trajectory.samples()) == 1
    assert made.engine.requests == [], "no engine is asked"
