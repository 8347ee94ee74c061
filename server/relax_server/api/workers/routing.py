"""Which worker serves a request."""

from __future__ import annotations

from enum import Enum

from relax_server.api.workers.head import RequestHead
from relax_server.api.workers.place import HOME, WorkerPlace, worker_of

SLACK = 4
"""Sessions that a worker may have more than the emptiest one before others get the next ones."""


class Serves(Enum):
    """Who serves the requests of a path."""

    ANYBODY = "the worker that the connection is at: it knows as much as any other"
    HOME = "worker 0"
    NAMED = "the worker that is named in the id in the path"
    KEYED = "the worker that is named in the key that is shown, which is a session's"
    NEXT = "the workers in turn, those with more sessions than others left out"
    NEAREST = "the worker that the connection is at, unless it has more sessions than others"


TABLE = {
    "healthz": Serves.ANYBODY,
    "readyz": Serves.ANYBODY,
    "metrics": Serves.ANYBODY,
    "docs": Serves.ANYBODY,
    "openapi.json": Serves.ANYBODY,
    "v1/healthz": Serves.ANYBODY,
    "v1/readyz": Serves.ANYBODY,
    "v1/metrics": Serves.ANYBODY,
    "v1/models": Serves.ANYBODY,
    "v1/keys": Serves.ANYBODY,
    "v1/trajectories": Serves.ANYBODY,
    "v1/media": Serves.ANYBODY,
    "v1/sessions": Serves.NAMED,
    "v1/openai": Serves.KEYED,
    "v1/chat": Serves.NEAREST,
    "v1/rollouts": Serves.HOME,
    "v1/runs": Serves.HOME,
    "v1/relay": Serves.HOME,
    "v1/envs": Serves.HOME,
    "v1/env-host": Serves.HOME,
    "v1/engines": Serves.HOME,
    "v1/pause": Serves.HOME,
    "v1/resume": Serves.HOME,
}
"""By the beginning of the path. What is not here is nobody's, and any worker says so."""
OPENING = {
    ("POST", "/v1/sessions"): Serves.NEXT,
    ("GET", "/v1/sessions/ws"): Serves.NEXT,
    ("GET", "/v1/sessions"): Serves.ANYBODY,
}
"""Before `TABLE`: whole paths."""
ID_BEGINS = "s_"
SECRET_BEGINS = "rls_"
"""What ids and secrets of sessions begin with."""


def serves(method: str, path: str) -> Serves:
    """Who serves a request.

    Args:
        method: in capitals.
        path: unquoted.
    """
    found = OPENING.get((method, path.rstrip("/")))
    if found is None:
        parts = path.split("/", 3)
        found = TABLE.get("/".join(parts[1:3]) if parts[1:2] == ["v1"] else "".join(parts[1:2]), Serves.ANYBODY)
    return found


class Routing:
    """Chooses the worker for each request. Belongs to one event loop.

    Args:
        place: of this worker.
    """

    def __init__(self, place: WorkerPlace) -> None:
        self._place = place
        self._turn = place.index

    def worker(self, head: RequestHead) -> int:
        """The number of the worker that serves a request; this one's where no other does."""
        place = self._place
        match serves(head.method, head.path):
            case Serves.ANYBODY:
                return place.index
            case Serves.HOME:
                return HOME
            case Serves.NAMED:
                worker = worker_of(head.path.split("/", 4)[3].removeprefix(ID_BEGINS)) if head.path.count("/") > 2 else HOME
            case Serves.KEYED:
                worker = worker_of(head.secret.removeprefix(SECRET_BEGINS))
            case Serves.NEXT:
                worker = self._next()
            case Serves.NEAREST:
                worker = place.index if place.index in self._emptiest() else self._next()
        return worker if worker < place.count else place.index  # of a service that had more workers: unknown here as there

    def _emptiest(self) -> list[int]:
        """Workers that take requests and have few sessions, compared with the others."""
        board = self._place.board
        counts = {worker: board.sessions(worker) for worker in range(self._place.count) if board.up(worker)}
        least = min(counts.values(), default=0)
        return [worker for worker, count in counts.items() if count <= least + SLACK]

    def _next(self) -> int:
        ready = self._emptiest()
        self._turn += 1
        return ready[self._turn % len(ready)] if ready else self._place.index
