"""All trajectories of a run as columns, without what was said in them."""

from __future__ import annotations

from typing import Any

from relax_server.journal.finding import TrajectoryQuery, TrajectoryRow
from relax_server.journal.sql import SqlJournal

MOST = 20_000
"""Rows of one answer."""
COLUMNS = (
    *("seq", "id", "group_id", "split", "env", "task_index", "group_index", "status", "reward", "version_min", "version_max"),
    *("staleness", "step", "advantage", "gap", "turns", "attempts", "created_at", "error"),
)


def trajectories_page(journal: SqlJournal | None, run: str, query: TrajectoryQuery) -> dict[str, Any]:
    """Trajectories by column, oldest first.

    Args:
        journal: of the run; None: there is none yet.
        run: its name there.
        query: which; their order is that of the commits whatever it says.
    """
    rows = journal.find(run, query) if journal is not None else []
    total = journal.count(run, TrajectoryQuery()) if journal is not None else 0
    last = rows[-1].seq if rows else query.after or 0
    return columns_of(rows) | {"next": last, "total": total, "more": len(rows) == query.limit}


def columns_of(rows: list[TrajectoryRow]) -> dict[str, Any]:
    """Rows as columns, and the components of their rewards."""
    columns = {name: [getattr(row, name) for row in rows] for name in COLUMNS}
    columns["tokens"] = [row.n_tokens for row in rows]
    columns["media"] = [None if row.media is None else "+".join(row.media) for row in rows]
    return {"columns": columns, "components": _components(rows)}


def _components(rows: list[TrajectoryRow]) -> dict[str, list[float | None]]:
    names = dict.fromkeys(name for row in rows for name in row.rewards)
    return {name: [row.rewards.get(name) for row in rows] for name in names}


def search_page(journal: SqlJournal | None, run: str, text: str) -> dict[str, Any]:
    """Numbers of the trajectories in which a text was said, newest first."""
    found = journal.find(run, TrajectoryQuery(text=text, limit=MOST)) if journal is not None and text.strip() else []
    return {"seqs": [row.seq for row in found]}
