"""The bus: complete, fresh groups for the trainer."""

from __future__ import annotations

from relax_sdk.config import BusName
from relax_server.bus.base import Bus
from relax_server.journal.base import Journal

__all__ = ["open_bus"]


def open_bus(name: BusName, journal: Journal, run: str, consumer: str, *, ttl: float, ahead: int = 0) -> Bus:
    """The bus of a run.

    Args:
        name: `local` leases straight from the journal; `transfer_queue` hands groups on through TransferQueue on Ray.
        journal: where the groups are; whoever opened it closes it.
        run: the run's id.
        consumer: a name that the trainer keeps when it restarts.
        ttl: seconds a lease lasts without `renew`.
        ahead: groups that `transfer_queue` leases before they are asked for, so that other roles can begin with them.

    Raises:
        ConfigError: what this bus needs is not installed.
    """
    if name == "local":
        from relax_server.bus.local import LocalBus

        return LocalBus(journal, run, consumer, ttl=ttl)
    from relax_server.bus.transfer_queue import TransferQueueBus

    return TransferQueueBus(journal, run, consumer=consumer, ttl=ttl, ahead=ahead)
