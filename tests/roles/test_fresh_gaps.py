"""Which tokens of a step tell whether engine and trainer see the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from relax_server.roles.fresh_gaps import fresh_gaps
from relax_server.training.step_tokens import StepTokens

from relax_sdk.media import MediaRef
from relax_sdk.trajectory import Sample

SOUND = MediaRef("0" * 64, "audio/wav", 100, sampling_rate=16_000, duration=1.0)


def sample(versions: list[int], turns: list[int], media: list[MediaRef]) -> Sample:
    """A prompt of two tokens, then answers."""
    n = len(versions)
    return Sample([7] * (n + 2), [0, 0] + [1] * n, [0.0] * (n + 2), [-1, -1, *versions], [-1, -1, *turns], media)


def step_tokens(samples: list[Sample], gaps: list[float]) -> StepTokens:
    """What a step computed: the engine's logprobs are 0, and the trainer's as far below as the gaps say."""
    index = np.repeat(np.arange(len(samples)), [sum(s.loss_mask) for s in samples])

    class Trained(SimpleNamespace):
        def __len__(self) -> int:
            return len(index)

    batch = SimpleNamespace(trained=Trained(sample=index, logprob=np.zeros(len(index))))
    tokens = StepTokens(cast(Any, SimpleNamespace(samples=samples)), cast(Any, batch), np.zeros(len(index), np.float32))
    tokens.logprobs[:] = [-gap for gap in gaps]
    return tokens


def test_only_turns_that_are_wholly_of_the_trainers_weights_count() -> None:
    samples = [
        sample([3, 3], [0, 0], [SOUND]),  # fresh
        sample([2, 3, 3], [0, 0, 1], [SOUND]),  # its first turn went on over an update, its second began after it
        sample([2, 2], [0, 0], []),  # older
        sample([3, 3], [0, 0], []),  # fresh; of one token the logprob of before the update is not known
    ]
    found = fresh_gaps(step_tokens(samples, [0.5, 0.25, 9.0, 9.0, 0.75, 9.0, 9.0, 0.125, float("nan")]), 3)
    assert found["fresh_tokens"] == {"audio": 3, "text": 1}
    assert found["logprob_gap_fresh"] == {"audio": pytest.approx(0.5), "text": pytest.approx(0.125)}


def test_nothing_is_told_where_all_is_older() -> None:
    older = step_tokens([sample([2, 2], [0, 0], [SOUND])], [0.5, 0.5])
    assert fresh_gaps(older, 3) == {"logprob_gap_fresh": {}, "fresh_tokens": {}}
