"""What the episodes of a run answered, to compare runs by."""

from __future__ import annotations

from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout

import relax_sdk as relax


def tokens_of(run: relax.Run, tasks: int) -> dict[str, list[list[int]]]:
    """The response tokens of every episode of the first train tasks, by its id without the run's name."""
    journal = open_journal(RunLayout(run.folder).journal)
    groups = journal.groups(run.folder.name, limit=1000)
    journal.close()
    played = (t for group in groups if group.task_index < tasks for t in group.trajectories)
    return {t.id.partition("/")[2]: [turn.response_ids for turn in t.turns] for t in played}
