"""What computing a group's shared prompt once is worth, over padding and over plain packing.

    python -m benchmarks.forest [--times 5]

Groups of 16 answers to one prompt of P tokens, R tokens each (or drawn from a range), are trained on for a step with the
dense and the expert text model: in forests that share the prompt, packed one sample after the other, and padded, where
every sample is filled up to the length of the longest with tokens that are not trained. Seconds are of planning, forward and
backward, medians over the repetitions; the three ways take turns. For the table everything is shared that can be;
`planner` is what it would do by itself.
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.report import save
from relax_sdk.media import MediaRef
from relax_sdk.trajectory import Group, Status, Trajectory, Turn, VersionSpan

GROUP = 16
SHAPES: tuple[tuple[int, tuple[int, int], int], ...] = (
    (32, (1, 1), 16),
    (32, (8, 8), 2),
    (300, (8, 8), 2),
    (300, (64, 64), 1),
    (64, (16, 256), 1),
    (64, (256, 256), 1),
    (8, (64, 64), 2),
    (8, (256, 256), 1),
    (2, (256, 256), 1),
)
"""Prompt tokens, response tokens from and to, groups."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["relax/tiny-qwen3", "relax/tiny-omni"])
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for model in args.models:  # Megatron is one model to a process
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            rows += process.submit(one_model, model, args.times).result()
    save("forest", rows)


def one_model(model: str, times: int) -> list[dict[str, Any]]:
    """The rows of one model."""
    bench, rows = Bench(model), list[dict[str, Any]]()
    for shape in SHAPES:
        rows.append({"model": model} | bench.compare(*shape, times))
        print(rows[-1], flush=True)
    return rows


class Bench:
    """One model, in this process."""

    def __init__(self, model: str) -> None:
        from relax_server.models.catalog import resolve_model
        from relax_server.training.policy import PolicyModel

        from relax_sdk.config import AlgorithmConfig, OptimizerConfig, TrainingConfig

        self.policy = PolicyModel(
            resolve_model(model),
            algorithm=AlgorithmConfig(entropy_coef=0.01),
            optimizer=OptimizerConfig(lr=1e-12),
            training=TrainingConfig(),
            total_steps=1000,
            seed=0,
        )

    def step(self, groups: list[Group], share: bool) -> dict[str, float]:
        """Metrics of a training step."""
        self.policy.training = replace(self.policy.training, share_prompts=share)
        return self.policy.train_step(groups, no_media, version=0)

    def compare(self, prompt: int, response: tuple[int, int], groups: int, times: int) -> dict[str, Any]:
        """All ways of one shape."""
        from relax_server.training import forest

        drawn, filled = (make_groups(prompt, response, groups, pad) for pad in (False, True))
        least = forest.LEAST_SAVED
        chosen = "shared" if self.step(drawn, True)["shared"] else "plain"
        seen: dict[str, list[float]] = {}
        tokens: dict[str, int] = {}
        for _ in range(times + 1):
            for way, batch, share in (("shared", drawn, True), ("packed", drawn, False), ("padded", filled, False)):
                forest.LEAST_SAVED = 0.0
                try:
                    metrics = self.step(batch, share)
                finally:
                    forest.LEAST_SAVED = least
                seen.setdefault(way, []).append(metrics["seconds_plan"] + metrics["seconds_forward_backward"])
                tokens[way] = int(metrics["forest_tokens"])
        middle = {way: statistics.median(values[1:]) for way, values in seen.items()}
        span = f"{response[0]}" if response[0] == response[1] else f"{response[0]} to {response[1]}"
        row: dict[str, Any] = {"P": prompt, "R": span, "groups": groups}
        row |= {f"{way}, tokens": tokens[way] for way in seen} | {f"{way}, s": middle[way] for way in seen}
        row |= {"over padding": middle["padded"] / middle["shared"], "over packing": middle["packed"] / middle["shared"]}
        return row | {"planner": chosen}


def no_media(ref: MediaRef) -> bytes:
    raise AssertionError(f"a text sample asked for {ref}")


def make_groups(prompt: int, response: tuple[int, int], n: int, pad: bool) -> list[Group]:
    """Random groups; with `pad` every answer is as long as the longest."""
    rng, made = np.random.default_rng(0), list[Group]()
    for g in range(n):
        question = rng.integers(32, 200, prompt).tolist()
        lengths = [response[1] if pad else int(length) for length in rng.integers(response[0], response[1] + 1, GROUP)]
        trajectories = [trajectory(g, i, question, rng.integers(32, 200, length).tolist()) for i, length in enumerate(lengths)]
        made.append(Group(str(g), "bench-v0", g, trajectories))
    return made


def trajectory(group: int, index: int, question: list[int], answer: list[int]) -> Trajectory:
    turn = Turn(question, answer, [-5.0] * len(answer), [VersionSpan(0, 0, len(answer))])
    return Trajectory(
        id=f"{group}-{index}",
        env="bench-v0",
        env_version="0",
        task_index=group,
        group_id=str(group),
        group_index=index,
        group_size=GROUP,
        seed=index,
        status=Status.COMPLETED,
        turns=[turn],
        messages=[],
        reward=float(index % 2),
        rewards={"env": float(index % 2)},
    )


if __name__ == "__main__":
    main()
