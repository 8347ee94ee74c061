"""Acting in a session's environment, for every way in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_sdk.config import SamplingParams
from relax_sdk.media import MediaKey, MediaRef
from relax_sdk.messages import AssistantMessage, Message
from relax_server.gateway.bodies import StepBody
from relax_server.gateway.errors import bad
from relax_server.gateway.openai_chat import read_message
from relax_server.gateway.played import PlayedSession, Surroundings
from relax_server.gateway.reading import Parsed, understand, weight
from relax_server.gateway.wire import on_wire, plain


async def take_step(around: Surroundings, session: PlayedSession, body: StepBody) -> Any:
    """Carry an action out, and say what the environment answered.

    Args:
        around: where stored media are found.
        session: whose environment.
        body: the request.

    Raises:
        ApiError: not an assistant message, or the session is over.
        EpisodeError: the environment failed.
    """
    raw = Parsed({"action": [{"role": "assistant", **body.action}]}, weight(body.action), True)
    action = await understand(around, session, raw, "action", _read)
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


def _read(value: Any, base: SamplingParams, media: Mapping[MediaKey, MediaRef], session: PlayedSession) -> Message:
    return read_message(value["action"][0], 0, media)
