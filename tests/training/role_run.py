"""A policy role in a run folder whose journal holds groups already, without the processes around it."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_server.journal.base import JournalCounts
from training_data import ITEMS

from relax_sdk.config import RunConfig
from relax_sdk.errors import TokenError
from relax_sdk.media import MediaStore
from relax_sdk.trajectory import Group


@dataclass(frozen=True)
class RoleRun:
    """What came of it."""

    messages: list[Any]
    """All that the role has said to its controller."""
    counts: JournalCounts
    """Groups of the journal by state."""
    failures: dict[str, str]
    """Why groups were set aside, by id."""
    error: str
    """What training ended with; empty where it went to the last step."""

    def said(self, kind: type) -> list[Any]:
        """Messages of one kind."""
        return [message for message in self.messages if isinstance(message, kind)]


class Told:
    """The controller's end of a channel."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)


def commit_in(folder: Path, groups: Sequence[Group]) -> None:
    """Put groups, and the media that tests use, into a run folder that has no journal yet."""
    from relax_server.journal import open_journal
    from relax_server.roles.layout import RunLayout

    layout = RunLayout(folder)
    store = MediaStore(layout.media)
    for item in ITEMS.values():
        store.put(item)
    journal = open_journal(layout.journal)
    journal.commit_many(groups, folder.name)
    journal.close()


def train_in(folder: Path, config: RunConfig, groups: Sequence[Group]) -> RoleRun:
    """Train until the last step or an error; call it in a worker.

    Args:
        folder: of the run.
        config: of the run.
        groups: what its journal holds; where there is a journal already, it stays as it is.
    """
    from relax_server.models.catalog import resolve_model
    from relax_server.roles.layout import RunLayout
    from relax_server.roles.messages import Continue, StartPolicy
    from relax_server.roles.policy import PolicyRole

    if not RunLayout(folder).journal.exists():
        commit_in(folder, groups)
    (folder / "weights").mkdir(exist_ok=True)
    channel, inbox = Told(), queue.SimpleQueue()
    if config.mode == "colocate":
        for _ in range(config.steps + 1):
            inbox.put(Continue())
    start = StartPolicy(config, folder.name, folder, resolve_model(config.model), folder / "weights", None)
    role = PolicyRole(channel, inbox, start)  # type: ignore[arg-type]
    role.begin()
    error = ""
    try:
        role.train()
    except TokenError as failed:
        error = str(failed)
    counts, failures = role.journal.counts(folder.name), role.journal.failures(folder.name)
    role.bus.close()
    role.journal.close()
    return RoleRun(channel.messages, counts, failures, error)
