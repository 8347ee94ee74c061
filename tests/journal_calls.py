"""Calls of a journal in one run, as short as the contract suites want them."""

from __future__ import annotations

from collections.abc import Callable

from relax_server.journal.base import Journal
from sample_groups import make_group

Open = Callable[..., Journal]
"""Opens the same journal once more, as another process would; its argument is the claim."""
RUN = "run-1"
TTL = 60.0
"""Seconds of a lease."""


def lease(journal: Journal, n: int = 1, consumer: str = "a", version: int = 0, k: int = 0, ttl: float = TTL) -> list[str]:
    """Lease `n` groups; returns their ids, none if there are too few."""
    return [lease.group.id for lease in journal.lease(n, RUN, consumer, version, k, ttl).leases]


def commit(journal: Journal, *ids: str, version: int = 0) -> None:
    """Commit a group of each id, all its tokens of one version."""
    for id in ids:
        assert journal.commit(make_group(id, versions=(version, version)), RUN)
