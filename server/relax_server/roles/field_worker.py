"""What the roles that compute a field have in common: rows are taken as soon as they are there, and their field is put.

And how the trainer waits for it.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_sdk.config import RunConfig
from relax_sdk.errors import RunError
from relax_sdk.trajectory import Group
from relax_server.roles.channel import Outlet
from relax_server.roles.layout import RunLayout
from relax_server.roles.messages import Beat, StartFields, Stop
from relax_server.timeline import Timeline

if TYPE_CHECKING:
    from relax_server.bus.field_queue import FieldQueue, Row

ADVANTAGES_ROLE, REFERENCE_ROLE = "advantages", "reference"
"""The roles."""

BEAT_SECONDS = 1.0
POLL_SECONDS = 0.25
"""How long one wait for rows lasts before control messages are looked at."""

FIELDS_SECONDS = 600.0
"""Seconds for the fields of a batch; the roles that compute them may be started again several times meanwhile."""

Compute = Callable[[list[Group]], Sequence[np.ndarray]]
"""The field of some groups."""


def field_roles(config: RunConfig) -> tuple[str, ...]:
    """The roles that compute fields in a run: none where groups reach the trainer straight from the journal."""
    if config.bus != "transfer_queue":
        return ()
    return (ADVANTAGES_ROLE, REFERENCE_ROLE) if config.needs_reference_model else (ADVANTAGES_ROLE,)


def serve_field(
    channel: Outlet, inbox: queue.SimpleQueue[Any], first: StartFields, role: str, field: str, at_once: int, compute: Compute
) -> None:
    """Compute one field of every group until a `Stop`.

    A group is computed again when its row is handed out again: after the queue was rebuilt, or when this role starts in the
    place of one that died. The values are the same, so nothing else depends on it.

    Args:
        channel: to the controller.
        inbox: from the controller.
        first: where the run and its queue are.
        role: its name, and that of its work in the queue.
        field: what is put.
        at_once: groups that are computed together at most; the trainer may wait for the first of them.
        compute: does the work.

    Raises:
        BusError: there has been no queue for too long.
    """
    if first.cluster is not None:
        os.environ |= first.cluster.environment  # before Ray is imported
    from relax_server.bus.field_queue import GROUP, FieldQueue

    timeline = Timeline(RunLayout(first.folder).timeline, role)
    fields = FieldQueue(first.run, address=first.cluster.address if first.cluster is not None else None)
    fields.retake(role)
    said = 0.0
    while not _stopped(inbox):
        rows = fields.take_fields([GROUP], at_once, role, POLL_SECONDS)
        if rows or time.monotonic() - said > BEAT_SECONDS:
            channel.send(Beat(waiting=not rows))
            said = time.monotonic()
        if rows:
            groups = [row.fields[GROUP] for row in rows]
            with timeline.span(field, groups=[group.id for group in groups]):
                fields.put_fields([group.id for group in groups], {field: compute(groups)})
    fields.close()


def wait_for_fields(
    fields: FieldQueue,
    group_ids: Sequence[str],
    names: Sequence[str],
    stopped: Callable[[], bool],
    seconds: float = FIELDS_SECONDS,
) -> list[Row] | None:
    """The fields of some groups, once they are there.

    Args:
        fields: where.
        group_ids: of the groups.
        names: of the fields.
        stopped: asked several times a second; True ends the waiting.
        seconds: to wait at most.

    Returns:
        One row a group, in order; None when `stopped` came first.

    Raises:
        RunError: they did not come in time.
        BusError: there has been no queue for too long.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if stopped():
            return None
        rows = fields.get_fields(group_ids, names, min(POLL_SECONDS, seconds))
        if rows is not None:
            return rows
    raise RunError(
        f"the fields {', '.join(names)} of {len(group_ids)} groups were not all there within {seconds:g} s: see why in the log "
        "of the role that computes them (advantages.log, reference.log), then go on with the run"
    )


def _stopped(inbox: queue.SimpleQueue[Any]) -> bool:
    try:
        return isinstance(inbox.get_nowait(), Stop)
    except queue.Empty:
        return False
