"""What a run says of the episodes that its first step waits for."""

from __future__ import annotations

from typing import Any

import pytest
from relax_server.roles.figures import waited_for

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
