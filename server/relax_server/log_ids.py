"""Context ids attached to log lines: all lines of a task, and of the tasks and threads that it starts, carry them."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

_ids: ContextVar[Mapping[str, str]] = ContextVar("relax_log_ids", default=MappingProxyType({}))


def add_ids(**ids: str) -> None:
    """Let lines carry these ids from here on: `key`, `session`, `rollout`, `trajectory`."""
    _ids.set({**_ids.get(), **ids})


def current_ids() -> Mapping[str, str]:
    """The ids that a line written now carries."""
    return _ids.get()
