"""The table of algorithms: what a name in `AlgorithmConfig` stands for, and how a user's own function gets a place in it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from relax_sdk.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

KINDS = {
    "advantage": "(rewards of one group, float64 [n]) -> advantages [n]",
    "policy_loss": "(logprobs, old_logprobs, advantages, config) -> PolicyLoss, all [n]",
    "correction": "(proximal_logprobs, behavior_logprobs, config) -> weights [n] without gradient",
    "kl_estimator": "(logprobs, reference_logprobs) -> the KL term of the loss, [n]",
    "aggregation": "(sample of each token, int64 [n]) -> weights float32 [n], whose mean is 1",
}
"""What may be named, and the form of its functions; each is the field of `AlgorithmConfig` that names it."""

_TABLE: dict[str, dict[str, Callable[..., Any]]] = {kind: {} for kind in KINDS}


def register(kind: str, name: str) -> Callable[[F], F]:
    """Give a function a name that `AlgorithmConfig` may use; a decorator.

    Roles run in processes of their own, which know the names that ship. A function of yours is named in the configuration by
    where it is, `advantage="my_package.advantages:centered"`, and is imported there; it needs no registration.

    Args:
        kind: one of `KINDS`.
        name: without a colon.
    """

    def keep(function: F) -> F:
        _TABLE[kind][name] = function
        return function

    return keep


def names(kind: str) -> list[str]:
    """The registered names of a kind, in order."""
    return sorted(_TABLE[kind])


def find(kind: str, name: str) -> Callable[..., Any]:
    """The function that a name stands for.

    Args:
        kind: one of `KINDS`.
        name: a registered one, or `module:function`, which is imported.

    Raises:
        ConfigError: there is none; the message lists those that there are.
    """
    if name in _TABLE[kind]:
        return _TABLE[kind][name]
    module, _, function = name.partition(":")
    if not function:
        known = ", ".join(names(kind))
        raise ConfigError(f"algorithm.{kind} = {name!r}; there are {known}, and your own as 'package.module:function'")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"algorithm.{kind} = {name!r} cannot be imported in the trainer: {error}") from error
    if not callable(found):
        raise ConfigError(f"algorithm.{kind} = {name!r} is no function but {type(found).__name__}; it takes {KINDS[kind]}")
    return found
