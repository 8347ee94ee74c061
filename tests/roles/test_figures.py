"""What a run says of the episodes that it waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from relax_server.roles.figures import waited_for
from relax_server.roles.messages import Evaluate, Evaluating
from relax_server.roles.rollout import RolloutRole
from relax_server.rollout.evaluation import EvalResult

from relax_sdk.evaluation import Played

NOTHING: dict[str, Any] = {"committed": 0, "in_flight": 0, "ended": 0, "warmup": (0, 0)}


@pytest.mark.parametrize(
    ("stats", "text"),
    [
        ({}, ""),
        ({"warmup": (12, 96)}, "12 of 96 episodes are played"),
        ({"warmup": (96, 96)}, ""),
        ({"warmup": (96, 96), "in_flight": 8, "ended": 3}, "0 of 4 groups are complete, 3 episodes have ended"),
        ({"in_flight": 2, "committed": 2, "ended": 20}, "2 of 4 groups are complete, 20 episodes have ended"),
    ],
)
def test_what_the_first_step_waits_for_is_counted(stats: dict[str, Any], text: str) -> None:
    assert waited_for(NOTHING | stats, 4) == text


async def test_the_end_of_an_evaluation_is_told_however_soon_it_comes() -> None:
    told: list[Any] = []

    async def evaluate(limit: int, *, on_played: Any, **_: Any) -> EvalResult:
        for episodes in range(1, limit + 1):
            on_played(Played(episodes, limit, 0.0))
        return EvalResult(0.0, 0.0, limit)

    worker, channel, first = SimpleNamespace(evaluate=evaluate), SimpleNamespace(send=told.append), SimpleNamespace(train=True)
    role = SimpleNamespace(worker=worker, channel=channel, first=first)
    await RolloutRole.evaluate(cast(RolloutRole, role), Evaluate(3, "eval", 16))
    assert [message.played.episodes for message in told if isinstance(message, Evaluating)] == [1, 16]
