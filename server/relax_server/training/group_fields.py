"""The fields of a group: arrays that roles beside the policy compute, and their layout on the bus.

| field | array |
|---|---|
| `advantages` | float32 [turns of all trajectories]: trajectories in the group's order, the turns of each in theirs |
| `ref_log_probs` | float32 [tokens with loss mask 1]: those of `Group.counted` in order, `samples()` of each, tokens in order |

Every advantage of `algorithms` sees one whole group and nothing else, so a role that is handed groups computes what
the policy would. One that needs the batch or a model's value estimates does not belong there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relax_sdk.config import AlgorithmConfig, RunConfig
from relax_sdk.errors import TrainingError
from relax_sdk.trajectory import Group
from relax_server.training.samples import group_advantages

ADVANTAGES_FIELD, REF_LOG_PROBS = "advantages", "ref_log_probs"


@dataclass(frozen=True)
class Given:
    """Fields that a training step is given and need not compute; one array per group of its batch."""

    advantages: Sequence[np.ndarray]
    ref_log_probs: Sequence[np.ndarray] | None = None
    """None if the policy has a reference of its own, or needs none."""

    def only(self, index: int) -> Given:
        """What is given of one group of the batch."""
        reference = self.ref_log_probs
        return Given([self.advantages[index]], None if reference is None else [reference[index]])


def field_names(config: RunConfig) -> tuple[str, ...]:
    """The fields that a training step of a run is given."""
    return (ADVANTAGES_FIELD, REF_LOG_PROBS) if config.needs_reference_model else (ADVANTAGES_FIELD,)


def advantages_field(group: Group, algorithm: AlgorithmConfig) -> np.ndarray:
    """The field `advantages` of one group."""
    return np.array([a for turns in group_advantages(group, algorithm) for a in turns], np.float32)


def by_turn(group: Group, advantages: np.ndarray) -> list[list[float]]:
    """The field `advantages` as `group_advantages` returns it.

    Raises:
        TrainingError: it is of another group.
    """
    turns = [len(t.turns) for t in group.trajectories]
    if advantages.shape != (sum(turns),):
        raise TrainingError(
            f"group {group.id!r} has {sum(turns)} turns, but its field {ADVANTAGES_FIELD!r} has shape {list(advantages.shape)}"
        )
    return [part.tolist() for part in np.split(advantages, np.cumsum(turns)[:-1])]


def flat_logprobs(values: Sequence[np.ndarray], n: int) -> np.ndarray:
    """The fields `ref_log_probs` of a batch in the order of `batch.Trained`.

    Args:
        values: per group.
        n: trained tokens of the batch.

    Raises:
        TrainingError: there are more or fewer.
    """
    flat = np.concatenate([np.asarray(value, np.float32) for value in values])
    if flat.shape != (n,):
        raise TrainingError(f"the batch has {n} trained tokens, but its fields {REF_LOG_PROBS!r} have {len(flat)} numbers")
    return flat
