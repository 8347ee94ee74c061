"""Random groups of episodes with media, for measuring training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.parity import part
from relax_sdk import Message, Text
from relax_sdk.media import MediaRef
from relax_sdk.trajectory import Group, Status, Trajectory, Turn, VersionSpan

SIZE = 8
"""Episodes of a group."""


def random_groups(processor: Any, n: int, answer: int) -> tuple[list[Group], Callable[[MediaRef], bytes]]:
    """Groups of one-turn episodes; answers are random bytes, half to a whole `answer` tokens long.

    Returns:
        Groups, and what reads their media: an image, a sound and a film in each group where the model takes them.
    """
    rng, data, groups = np.random.default_rng(0), dict[str, bytes](), list[Group]()
    for g in range(n):
        items = [part(kind, rng) for kind in "iav"] if processor.placeholder_ids else []
        data |= {item.ref.sha256: item.bytes() for item in items}
        rendered = processor.render([Message("user", (*items, Text("question " * 8)))])
        features = [processor.features(item.bytes(), item.ref.sha256, item.ref.kind) for item in items]
        ids = processor.expand(rendered.ids, features)
        episodes = [_episode(g, i, ids, items, rng, answer) for i in range(SIZE)]
        groups.append(Group(str(g), "bench-v0", g, episodes))
    return groups, lambda ref: data[ref.sha256]


def distinct_items(processor: Any, groups: list[Group], read: Callable[[MediaRef], bytes]) -> list[Any]:
    """The different media of groups as towers take them, `MediaFeatures`."""
    refs = {ref.sha256: ref for group in groups for episode in group.trajectories for ref in episode.turns[0].media}
    return [processor.features(read(ref), ref.sha256, ref.kind) for ref in refs.values()]


def _episode(g: int, i: int, ids: list[int], items: list[Any], rng: np.random.Generator, answer: int) -> Trajectory:
    said = rng.integers(32, 120, int(rng.integers(answer // 2, answer + 1))).tolist()
    turn = Turn(list(ids), said, [-5.0] * len(said), [VersionSpan(0, 0, len(said))], media=[item.ref for item in items])
    return Trajectory(
        id=f"{g}-{i}",
        env="bench-v0",
        env_version="0",
        task_index=g,
        group_id=str(g),
        group_index=i,
        group_size=SIZE,
        seed=i,
        status=Status.COMPLETED,
        turns=[turn],
        messages=[],
        reward=float(i % 2),
        rewards={"env": float(i % 2)},
    )
