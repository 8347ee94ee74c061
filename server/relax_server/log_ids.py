"""Whose doing a log line is about: ids that all lines of a task carry, and of the tasks and threads that it starts."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

_ids: ContextVar[Mapping[str, str]] = ContextVar("relax_log_ids", default=MappingProxyType({}))


def add_ids(**ids: str) -> None:
    """From here on lines carry these ids: `key`, `session`, `rollout`, `trajectory`."""
    _ids.set({**_ids.get(), **ids})


def current_ids() -> Mapping[str, str]:
    """The ids that a line written now carries."""
    return _ids.get()
