"""Examples of an action's form, which the format warm-up asks of an environment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from relax_sdk.env import Env
from relax_sdk.errors import EnvError, EpisodeTimeout, RelaxError, raised
from relax_sdk.messages import AssistantMessage, Text

ADVICE = (
    "it is asked after reset, at every turn in place of a model, and returns an action; leave it out, or set warmup.steps = 0, "
    "for a run without a warm-up"
)


def gives_examples(env_class: type[Env]) -> bool:
    """Whether an environment defines `format_example`; told without calling it, as it may need what `reset` sets."""
    return env_class.format_example is not Env.format_example


async def ask_example(env: Env, rng: np.random.Generator, invoke: Callable[..., Awaitable[Any]]) -> AssistantMessage:
    """One example of an action, from an environment that was reset.

    Args:
        env: the environment.
        rng: draws the contents.
        invoke: `await invoke(function, *arguments)` calls a plain or async function where it may block.

    Raises:
        EnvError: it raised, or returned something else than a message of the assistant or a string.
        EpisodeTimeout: it took too long.
    """
    name = f"format_example of {type(env).__name__}"
    try:
        action = await invoke(env.format_example, rng)
    except EpisodeTimeout as error:
        raise EpisodeTimeout(f"{name} {error}") from error
    except RelaxError:
        raise
    except Exception as error:
        raise EnvError(f"{name} {raised(error)}; {ADVICE}") from error
    if isinstance(action, str):
        return AssistantMessage(content=(Text(action),))
    if not isinstance(action, AssistantMessage):
        raise EnvError(f"{name} returned {type(action).__name__}, not an AssistantMessage or a string; {ADVICE}")
    return action
