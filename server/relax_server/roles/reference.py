"""The reference role: a frozen Megatron model says how likely the response tokens of each group were under it."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np

from relax_sdk.errors import MediaError, TokenError
from relax_sdk.media import MediaStore
from relax_sdk.trajectory import Group
from relax_server.roles.channel import Outlet
from relax_server.roles.field_worker import REFERENCE_ROLE, serve_field
from relax_server.roles.layout import RunLayout
from relax_server.roles.messages import StartFields
from relax_server.training.group_fields import REF_LOG_PROBS
from relax_server.training.model import LogprobModel

AT_ONCE = 4
"""Groups; together they fill forests better, but the trainer waits longer for the first of them."""


def run_reference(channel: Outlet, inbox: queue.SimpleQueue[Any], first: StartFields) -> None:
    """Serve until a `Stop`."""
    config, store = first.config, MediaStore(RunLayout(first.folder).media)
    model = LogprobModel(
        reference_weights(first),
        training=config.training,
        seed=config.seed,
        sampling=config.sampling,
        features=first.features,
    )
    serve_field(
        channel,
        inbox,
        first,
        REFERENCE_ROLE,
        REF_LOG_PROBS,
        AT_ONCE,
        lambda groups: logprobs_of_sound_groups(model, groups, store),
    )


def logprobs_of_sound_groups(model: LogprobModel, groups: list[Group], store: MediaStore) -> list[np.ndarray]:
    """The field of each group; empty for one that cannot be computed, which the policy finds and sets aside by itself."""
    try:
        return model.group_logprobs(groups, store.get)
    except (MediaError, TokenError):
        if len(groups) == 1:
            return [np.zeros(0, np.float32)]
        return [logprobs_of_sound_groups(model, [group], store)[0] for group in groups]


def reference_weights(first: StartFields) -> Path:
    """The weights that reinforcement learning began with: what the warm-up left in the run folder, or else the model."""
    warmed_up = RunLayout(first.folder).reference
    return warmed_up if warmed_up.exists() else first.model_path
