"""Opening a session, for every way in."""

from __future__ import annotations

import secrets
from typing import Any

from relax_server.api.core import ServiceCore
from relax_server.api.external_session import ExternalSession, Opening
from relax_server.api.keys import Key
from relax_server.api.schemas import SEED_BITS, SessionBody
from relax_server.api.sessions import SessionHub, default_run
from relax_server.gateway.wire import on_wire


async def open_session(
    core: ServiceCore, hub: SessionHub, key: Key, wanted: SessionBody, base: str
) -> tuple[ExternalSession, dict[str, Any]]:
    """Open an episode that an agent outside plays; returns it, and what the agent is told.

    Args:
        core: of the service.
        hub: of its sessions.
        key: of the caller.
        wanted: the request.
        base: URL of the service as the caller knows it.

    Raises:
        RelaxError: it cannot be opened.
    """
    opening = Opening(
        env=wanted.env,
        split=wanted.split,
        task_index=wanted.task_index,
        seed=secrets.randbits(SEED_BITS) if wanted.seed is None else wanted.seed,
        seeded=wanted.seed is not None,
        run=wanted.run or default_run(key),
        train=wanted.mode == "train",
        sampling=wanted.sampling.over(core.config.sampling),
        limits=wanted.limits.model_dump(exclude_none=True),
        sample_index=wanted.sample_index,
        metadata=wanted.metadata,
    )
    opened, secret, messages = await hub.open(opening, key)
    opened.media_form = wanted.media
    outcome = opened.episode.session.outcome
    return opened, {
        "id": opened.id,
        "key": secret,
        "base_url": f"{base.rstrip('/')}/v1/sessions/{opened.id}/openai/v1",
        "observation": on_wire(messages, wanted.media),
        "tools": list(opened.tools),
        "task_index": opened.episode.task.task_index,
        "seed": opened.episode.task.seed,
        "info": outcome.info if outcome is not None else {},
        "trajectory_id": opened.trajectory_id,
    }
