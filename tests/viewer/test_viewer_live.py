"""The stream of what changes in a run, over a real server: it follows the run, and ends with the right to look."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import orjson
import uvicorn
from httpx_sse import aconnect_sse
from relax_server.gateway.errors import ApiError
from relax_server.journal import open_journal
from relax_server.viewer import live
from relax_server.viewer.app import ViewerApp
from relax_server.viewer.base import Source
from relax_server.viewer.folders import FolderSource
from relax_server.viewer.journals import Journals
from relax_server.viewer.pages import Pages
from relax_server.viewer.serve import listen, make_app
from starlette.requests import HTTPConnection
from viewed_runs import add_steps, make_group, make_run

from relax_sdk.run_lock import Holder, RunLock

LIMIT = 60.0


@contextmanager
def served(app) -> Iterator[str]:
    """The URL of a server in a thread."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/view/data"
    finally:
        server.should_exit = True
        thread.join(LIMIT)
        listener.close()
        assert not thread.is_alive(), "the server did not end"


async def until(events: AsyncIterator, wanted) -> dict:
    """The first event that fits."""
    async with asyncio.timeout(LIMIT):
        async for event in events:
            data = orjson.loads(event.data)
            if wanted(event.event, data):
                return data
    raise AssertionError("the stream ended")


async def test_a_stream_tells_what_changes(tmp_path: Path) -> None:
    folder = make_run(tmp_path, steps=1)
    with served(make_app(FolderSource([tmp_path], Journals()))) as url, RunLock(folder, Holder.here()):
        async with httpx.AsyncClient(timeout=LIMIT) as http, aconnect_sse(http, "GET", f"{url}/runs/tone/live") as source:
            events = source.aiter_sse()
            first = await until(events, lambda kind, data: kind == "changed")
            metrics = (await http.get(f"{url}/runs/tone/metrics.json")).json()
            assert (first["seq"], first["state"], first["metrics"]) == (13, "running", metrics["next"])
            journal = open_journal(folder / "journal.db")
            journal.commit(make_group(9, "tone", folder / "hf", []), "tone")
            await until(events, lambda kind, data: data["seq"] == 17)
            add_steps(folder, 2, 2)
            changed = await until(events, lambda kind, data: data["metrics"] != first["metrics"])
            (folder / "status.json").write_text('{"state": "training", "step": 2}')
            await until(events, lambda kind, data: data["status"] == {"state": "training", "step": 2})
            journal.close()
            more = (await http.get(f"{url}/runs/tone/metrics.json", params={"after": metrics["next"]})).json()
            assert (more["columns"]["step"], more["next"]) == ([2], changed["metrics"])
        assert (await httpx.AsyncClient().get(f"{url}/runs/none/live")).status_code == 404


async def test_a_stream_ends_when_the_caller_may_not_look_any_more(tmp_path: Path, monkeypatch) -> None:
    make_run(tmp_path)
    monkeypatch.setattr(live, "CHECK_SECONDS", 0.0)
    allowed, source = [True], FolderSource([tmp_path], Journals())

    class Door:
        async def enter(self, request: HTTPConnection) -> Source:
            if not allowed:
                raise ApiError(401, "this key is revoked", "invalid_api_key")
            return source

        async def wants_key(self) -> bool:
            return True

    with served(ViewerApp(Door(), Pages())) as url:
        async with (
            httpx.AsyncClient(timeout=LIMIT) as http,
            aconnect_sse(http, "GET", f"{url}/runs/tone/live") as stream,
        ):
            events = stream.aiter_sse()
            await until(events, lambda kind, data: kind == "changed")
            allowed.clear()
            over = await until(events, lambda kind, data: kind == "over")
            assert over["error"]["message"] == "this key is revoked"
            async with asyncio.timeout(LIMIT):
                assert [event async for event in events] == []
