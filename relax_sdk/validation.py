"""Checks of everything an environment returns; what is wrong is named before it can do harm."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from relax_sdk.errors import EnvError
from relax_sdk.messages import Message, as_messages
from relax_sdk.session import StepOutcome
from relax_sdk.storable import storable_text

MAX_INFO_DEPTH = 8


def check_reset(result: Any, observes: bool = True) -> tuple[list[Message], dict[str, Any]]:
    """The messages and the info of a reset.

    Args:
        result: what the environment returned.
        observes: whether there must be an observation.

    Raises:
        EnvError: not `(observation, info)`, or no observation.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvError(f"reset must return (observation, info), got {_shape(result)}")
    messages = as_messages(result[0])
    if not messages and observes:
        raise EnvError("reset returned no observation; the policy needs something to answer")
    return messages, check_info("reset", result[1])


def check_step(result: Any) -> StepOutcome:
    """The five values of a step.

    Raises:
        EnvError: not `(observation, reward, terminated, truncated, info)`, a reward that is not a finite number, or flags
            that are not bool.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvError(f"step must return (observation, reward, terminated, truncated, info), got {_shape(result)}")
    observation, reward, terminated, truncated, info = result
    return StepOutcome(
        as_messages(observation),
        check_reward("step", reward),
        check_flag("terminated", terminated),
        check_flag("truncated", truncated),
        check_info("step", info),
    )


def check_reward(source: str, reward: Any) -> float:
    """`reward` as a float.

    Raises:
        EnvError: not a number, NaN or infinite.
    """
    if isinstance(reward, np.ndarray) and reward.ndim == 0:
        reward = reward.item()
    if not isinstance(reward, (int, float, np.number)) or isinstance(reward, np.complexfloating):
        raise EnvError(f"the reward of {source} must be a number, got {type(reward).__name__}")
    if not math.isfinite(reward):
        raise EnvError(f"the reward of {source} is {reward}; it must be finite")
    return float(reward)


def check_flag(name: str, flag: Any) -> bool:
    """`flag` as a bool.

    Raises:
        EnvError: neither bool nor numpy bool.
    """
    if not isinstance(flag, (bool, np.bool_)):
        raise EnvError(f"{name} must be a bool, got {type(flag).__name__} {flag!r:.40}")
    return bool(flag)


def check_info(source: str, info: Any) -> dict[str, Any]:
    """`info` as a dictionary.

    Raises:
        EnvError: not a mapping.
    """
    if not isinstance(info, Mapping):
        raise EnvError(f"the info of {source} must be a dictionary, got {type(info).__name__}")
    return dict(info)


_DROPPED = object()


def plain_data(info: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `info` that is plain data: None, bool, int (64 bits), float, str, and lists and dictionaries of these.

    Numpy numbers become Python's, and lone surrogates in text U+FFFD; everything else is left out.
    """
    kept = _plain(info, 0)
    return kept if isinstance(kept, dict) else {}


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return storable_text(value)
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else _DROPPED
    if depth >= MAX_INFO_DEPTH:
        return _DROPPED
    if isinstance(value, Mapping):
        made = {storable_text(key): _plain(item, depth + 1) for key, item in value.items() if isinstance(key, str)}
        return {key: item for key, item in made.items() if item is not _DROPPED}
    if isinstance(value, (list, tuple)):
        return [made for item in value if (made := _plain(item, depth + 1)) is not _DROPPED]
    return _DROPPED


def _shape(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    return type(result).__name__
