"""The advantages role: compares the episodes of each group as soon as the group is in the queue."""

from __future__ import annotations

import queue
from typing import Any

import torch

from relax_server.roles.channel import Outlet
from relax_server.roles.field_worker import ADVANTAGES_ROLE, serve_field
from relax_server.roles.messages import StartFields
from relax_server.training.group_fields import ADVANTAGES_FIELD, advantages_field

AT_ONCE = 16
"""Groups; each takes well under a millisecond."""


def run_advantages(channel: Outlet, inbox: queue.SimpleQueue[Any], first: StartFields) -> None:
    """Serve until a `Stop`."""
    torch.set_num_threads(1)
    algorithm = first.config.algorithm
    serve_field(
        channel,
        inbox,
        first,
        ADVANTAGES_ROLE,
        ADVANTAGES_FIELD,
        AT_ONCE,
        lambda groups: [advantages_field(group, algorithm) for group in groups],
    )
