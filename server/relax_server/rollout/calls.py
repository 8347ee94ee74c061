"""One model call of an agent: what it may ask for, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from relax_sdk.config import SamplingParams
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.trajectory import Turn
from relax_server.engines.base import Generation
from relax_server.rollout.recorder import Shown


@dataclass(frozen=True)
class CallOptions:
    """What an agent may ask of one model call."""

    sampling: SamplingParams | None = None
    """In place of the episode's."""
    tools: Sequence[dict[str, Any]] | None = None
    """That the policy is offered, OpenAI schemas; None: the environment's."""
    tools_key: str = ""
    """Names `tools`."""
    on_partial: Callable[[Generation], None] | None = None
    """Told of the answer as it grows."""
    shown: Shown | None = None
    """Makes of the answer what the agent is shown, and will send back."""


@dataclass(frozen=True)
class Answer:
    """What came of a model call."""

    message: AssistantMessage
    turn: Turn
    """As recorded; of a policy that tells no tokens, without any."""
    asked: list[Message]
    """The conversation that it answers, its media where the policy reads them."""
