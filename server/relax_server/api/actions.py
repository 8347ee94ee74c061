"""Opening a session and acting in its environment, for every way in."""

from __future__ import annotations

from typing import Any

from relax_sdk.media import MediaRef
from relax_sdk.messages import AssistantMessage, media_names
from relax_server.api.core import ServiceCore
from relax_server.api.errors import bad
from relax_server.api.keys import Key
from relax_server.api.openai_chat import read_message
from relax_server.api.played import PlayedSession, Surroundings
from relax_server.api.schemas import SessionBody
from relax_server.api.sessions import ExternalSession, Opening, SessionHub
from relax_server.api.wire import on_wire, plain


async def known_media(around: Surroundings, items: Any) -> dict[str, MediaRef]:
    """References of the stored media that a conversation names; unknown ones are left out, and refused where they stand."""
    return {name: ref for name in media_names(items) if (ref := await around.media_ref(name)) is not None}


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
        seed=wanted.seed,
        run=wanted.run,
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
        "seed": opened.episode.task.seed,
        "info": outcome.info if outcome is not None else {},
        "trajectory_id": opened.trajectory_id,
    }


async def take_step(around: Surroundings, session: PlayedSession, raw: Any) -> Any:
    """Carry an action out, and say what the environment answered.

    Args:
        around: where stored media are found.
        session: whose environment.
        raw: an assistant message.

    Raises:
        ApiError: not an assistant message, or the session is over.
        EpisodeError: the environment failed.
    """
    refs = await known_media(around, [raw])
    action = read_message({"role": "assistant", **raw} if isinstance(raw, dict) else raw, 0, refs)
    if not isinstance(action, AssistantMessage):
        raise bad("an action must be an assistant message", "action.role")
    outcome = await session.step(action)
    return plain(
        {
            "observation": on_wire(outcome.observation, session.media_form),
            "reward": outcome.reward,
            "terminated": outcome.terminated,
            "truncated": outcome.truncated,
            "info": outcome.info,
        }
    )
