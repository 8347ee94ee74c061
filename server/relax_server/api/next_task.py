"""Which task a session plays that names none."""

from __future__ import annotations

from collections import Counter

from relax_sdk.tasks import KeptRows
from relax_sdk.trajectory import derive_seed
from relax_server.api.workers.place import HOME, WorkerPlace
from relax_server.gateway.errors import ApiError

NEXT = "next task"


class NextTasks:
    """Hands out the tasks of each split in order, to each key on its own, and from the first one again after the last.

    Worker 0 counts for all workers of the service. While it is being started again each of the others counts for itself.

    Args:
        worker: where this is among the workers.
    """

    def __init__(self, worker: WorkerPlace) -> None:
        self._worker = worker
        self._next: Counter[tuple[str, ...]] = Counter()
        worker.on(NEXT, lambda message: {"number": self._count(*message.body["place"])})

    async def pick(self, rows: KeptRows, place: tuple[str, str, str], named: int | None, seed: int | None) -> int:
        """The index of a task.

        Args:
            rows: of the split.
            place: key, environment and split.
            named: the index that was asked for; None: none.
            seed: of the caller; None: none. It decides which task of a list it is, so that a seed is one episode.
        """
        if named is not None:
            return named
        if rows.finite and len(rows) == 1:
            return 0
        if seed is not None and rows.finite and len(rows):
            return derive_seed(seed, "task") % len(rows)
        number = await self._number(place)
        return number % len(rows) if rows.finite and len(rows) else number

    async def _number(self, place: tuple[str, str, str]) -> int:
        if self._worker.home:
            return self._count(*place)
        try:
            return (await self._worker.ask(HOME, NEXT, place=place))["number"]
        except ApiError:
            return self._count(*place)

    def _count(self, *place: str) -> int:
        number = self._next[place]
        self._next[place] += 1
        return number
