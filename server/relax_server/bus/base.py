"""The bus interface: complete, fresh groups for the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from relax_sdk.trajectory import Group

if TYPE_CHECKING:
    from relax_server.bus.field_queue import FieldQueue


@dataclass(frozen=True)
class GroupBatch:
    """Groups that one training step consumes."""

    groups: list[Group]
    version: int
    """`v_train` when the batch was taken."""
    staleness: list[int] = field(default_factory=list)
    """Per trajectory: `version - version_min`."""
    dropped: int = 0
    """Groups dropped as stale while this batch was taken."""
    waited: float = 0.0
    """Seconds."""
    ready: int = 0
    """Groups left ready after the take: the queue depth."""


class Bus(Protocol):
    """Hands complete, fresh groups to the trainer."""

    @property
    def fields(self) -> FieldQueue | None:
        """The queue where other roles put fields of the groups; None: no role does, groups come straight from the journal."""
        ...

    def take(self, n: int, version: int, max_staleness: int, timeout: float) -> GroupBatch | None:
        """Wait for `n` groups that are fresh enough, and lease them; None when `timeout` seconds passed first."""
        ...

    def give_back(self, batch: GroupBatch) -> None:
        """Undo a take whose batch is not trained on: its groups are ready again."""
        ...

    def set_aside(self, group_id: str, reason: str) -> None:
        """A group that was taken cannot be trained on: it is marked so in the journal and never served again."""
        ...

    def ack(self, group_ids: list[str], checkpoint: int) -> None:
        """The groups are inside checkpoint `checkpoint`."""
        ...

    def restore(self, checkpoint: int) -> int:
        """A trainer restarts from `checkpoint`; returns how many groups it will see again."""
        ...

    def forget(self, group_ids: Sequence[str]) -> None:
        """Let the fields of these groups go, as no role needs them any more. Their leases stay; `ack` forgets groups, too."""
        ...

    def release_ahead(self) -> None:
        """Give back what is leased ahead of `take`, and lease no more until the next one: for a trainer that ends."""
        ...

    def renew(self) -> None:
        """Keep the leases alive; called at least every third of the lease time."""
        ...

    def close(self) -> None:
        """Release connections; leases stay."""
        ...
