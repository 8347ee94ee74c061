"""An evaluation of an endpoint that ends early leaves nothing under way."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from relax_server.rollout.endpoint import evaluate_endpoint

import relax_sdk as relax
from relax_sdk.config import RunConfig

ASKING, BROKEN = 8, 64


class Rows(relax.Env):
    """The first eight rows are asked about; the others cannot be played."""

    blocking = False

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        super().reset(seed=seed)
        if (options or {})["task"]["n"] >= ASKING:
            await asyncio.sleep(0.2)
            raise LookupError("no such row")
        return "say something", {}

    async def step(self, action: relax.AssistantMessage) -> Any:
        return None, 1.0, True, False, {}

    @staticmethod
    def tasks() -> Any:
        return {split: [{"n": n} for n in range(ASKING + BROKEN)] for split in ("train", "eval")}


async def test_an_evaluation_that_ends_early_leaves_nothing_under_way():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there: the first eight ask again and again
        endpoint = relax.Endpoint(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "nobody")
        with pytest.raises(relax.RelaxError, match="no such row"):
            await evaluate_endpoint(relax.get_spec(Rows), RunConfig("rows"), endpoint)
        left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, "what asks after the client was closed would open a session that nobody closes"
