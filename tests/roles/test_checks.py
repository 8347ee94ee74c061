"""What is told of settings before a run begins."""

from __future__ import annotations

import pytest
from relax_server.roles.checks import algorithm_notes

from relax_sdk.config import AlgorithmConfig, RunConfig


@pytest.mark.parametrize(
    ("staleness", "settings", "told"),
    [
        (1, {"old_logprobs": "recompute"}, True),
        (0, {"old_logprobs": "recompute"}, False),
        (4, {"old_logprobs": "recompute", "updates_per_batch": 2}, False),
        (1, {}, False),
    ],
)
def test_a_ratio_that_is_one_by_definition_is_told(staleness: int, settings: dict, told: bool) -> None:
    notes = algorithm_notes(RunConfig("tone-v0", max_staleness=staleness, algorithm=AlgorithmConfig(**settings)))
    assert bool(notes) is told
    assert all("clip_low" in note and "tis_clip" in note for note in notes)
