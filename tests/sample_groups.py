"""Groups such as the rollout commits, for tests of the journal and what reads from it."""

from __future__ import annotations

from collections.abc import Sequence

from relax_sdk.trajectory import Group, Status, Trajectory, Turn, VersionSpan


def make_turn(tokens: int = 4, version: int = 0, prompt: Sequence[int] = (1, 2, 3)) -> Turn:
    """A turn whose `tokens` response tokens all come from weights `version`."""
    return Turn(
        prompt_ids=list(prompt),
        response_ids=list(range(10, 10 + tokens)),
        response_logprobs=[-0.5] * tokens,
        weight_versions=[VersionSpan(version, 0, tokens)] if tokens else [],
    )


def make_group(
    id: str, *, versions: Sequence[int | None] = (0, 0), task_index: int = 0, tokens: int = 4, env: str = "tone-v0"
) -> Group:
    """A group with one trajectory for each of `versions`; None is an episode that failed before its first token."""
    trajectories = [
        Trajectory(
            id=f"{id}-{index}",
            env=env,
            env_version="0",
            task_index=task_index,
            group_id=id,
            group_index=index,
            group_size=len(versions),
            seed=index,
            status=Status.FAILED if version is None else Status.COMPLETED,
            turns=[] if version is None else [make_turn(tokens, version)],
            messages=[{"role": "user", "content": "which tone?"}],
            reward=float(index),
            rewards={"env": float(index)},
        )
        for index, version in enumerate(versions)
    ]
    return Group(id, env, task_index, trajectories)


class ManualClock:
    """Unix seconds that stand still until they are moved."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
