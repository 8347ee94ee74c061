"""A run folder as training leaves it: groups of an environment with tools, several turns and media, really played."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollout_bench import bench, processor

import relax_sdk as relax
from relax_sdk import Audio, Image, Run, RunConfig
from relax_sdk.tools import ToolResult

__all__ = ["Bells", "bench", "processor", "recorded_run"]

ANSWERS = ["A", "<tool_call>ring(2)</tool_call>", "B", "CC"]
"""What the policy says, in turn: the second one rings a bell first."""


class Bells(relax.Env):
    """A picture, and a bell that can be rung; then a letter. A is right, and shorter answers are better."""

    modalities = {"image", "audio"}
    system_prompt = "Listen."
    tasks = staticmethod(lambda: {"train": [{"index": i} for i in range(6)], "eval": [{"index": i} for i in range(3)]})
    right = "A"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.index, self.rung = options["task"]["index"], 0
        return [Image.from_array(np.full((8, 8, 3), 20 * self.index, np.uint8)), "letter?"], {}

    @relax.tool
    def ring(self, times: int) -> ToolResult:
        """Ring the bell."""
        self.rung += times
        wave = np.sin(np.arange(1600) * (0.1 + 0.01 * self.index)).astype(np.float32)
        return ToolResult([Audio.from_array(wave), "rung"], reward=0.25)

    def step(self, action):
        return None, float(action.text == self.right), True, False, {}

    @relax.reward(weight=-0.5)
    def length(self, trajectory):
        return float(sum(len(turn.response_ids) for turn in trajectory.turns) - 2)

    @relax.reward(weight=0.0)
    def bells(self, trajectory):
        return float(self.rung)


Record = Callable[..., Awaitable[Run]]


@pytest.fixture
def recorded_run(bench, tmp_path: Path) -> Record:
    """`await recorded_run(env=Bells, groups=2, evals=1, group_size=4)`: a run of that many groups and held-out episodes."""

    async def record(env: Any = Bells, groups: int = 2, evals: int = 1, group_size: int = 4) -> Run:
        answers = itertools.cycle(ANSWERS)
        made = bench(env, lambda request: "A" if len(request.media) > 1 else next(answers), group_size=group_size)
        for index in range(groups):
            await made.worker.commit((await made.group(index, {"index": index})).group, "train")
        for index in range(evals):
            played = await made.group(index, {"index": index}, id=f"run/eval/4/{index}", split="eval", size=1)
            await made.worker.commit(played.group, "eval")
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "journal.db").symlink_to(tmp_path / "journal-0.db")
        (folder / "media").symlink_to(made.store.root)
        (folder / "config.json").write_text(json.dumps(RunConfig("test-v0", sampling=made.worker.config.sampling).to_dict()))
        return Run.load(folder, env=env)

    return record
