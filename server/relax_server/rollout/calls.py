"""One model call of an agent: what it may ask for, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from relax_sdk.config import SamplingParams
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.trajectory import Turn
from relax_server.engines.base import Generation
from relax_server.rollout.recorder import Shown


@dataclass(frozen=True)
class CallOptions:
    """What an agent may ask of one model call."""

    sampling: SamplingParams | None = None
    """Sampling parameters in place of the episode's; None: the episode's."""
    tools: Sequence[dict[str, Any]] | None = None
    """OpenAI schemas of the tools that the policy is offered; None: the environment's."""
    tools_key: str = ""
    """A name for `tools`, which stands for them in caches."""
    on_partial: Callable[[Generation], None] | None = None
    """A function that is told of the answer as it grows."""
    shown: Shown | None = None
    """Makes of the answer what the agent is shown, and will send back."""
    size: int = 0
    """Bytes of the request; 0 where there was none."""


class Meter(Protocol):
    """Who model calls are charged to."""

    async def reserve(self, tokens: int) -> None:
        """Take what a call may generate, before it is sent.

        Raises:
            RelaxError: it may not be sent.
        """
        ...

    def give_back(self, tokens: int) -> None:
        """Return what a call has not generated."""
        ...


@dataclass(frozen=True)
class Answer:
    """What came of a model call."""

    message: AssistantMessage
    turn: Turn
    """The turn as it was recorded; it holds no tokens where the policy tells none."""
    asked: list[Message]
    """The conversation that it answers, its media where the policy reads them."""
