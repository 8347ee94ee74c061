"""What was recorded, as it is asked for."""

from __future__ import annotations

import threading

from relax_server.rollout.fair_threads import MOST_WAITING
from service_inside import service_inside


async def test_a_trajectory_is_read_in_the_threads_that_keys_share(processor, tmp_path, monkeypatch) -> None:
    """One key's reading of large ones leaves a thread, and the database, to the others."""
    async with service_inside(processor, tmp_path) as it:
        session = await it.played()
        path = f"/v1/trajectories/{(await it.finish(session)).json()['trajectory_id']}"
        readers, read = list[str](), it.core.journal.owned_trajectory
        monkeypatch.setattr(
            it.core.journal, "owned_trajectory", lambda id: readers.append(threading.current_thread().name) or read(id)
        )
        told = await it.http.get(path)
        assert told.status_code == 200 and told.json()["turns"] and told.headers["content-type"] == "application/json"
        assert len(readers) == 1 and readers[0].startswith("requests"), readers
        assert (await it.http.get("/v1/trajectories/unknown")).status_code == 404

        it.core.work._pieces["local"] += MOST_WAITING
        refused = await it.http.get(path)
        assert refused.status_code == 429 and refused.headers["Retry-After"]
        it.core.work._pieces["local"] -= MOST_WAITING
