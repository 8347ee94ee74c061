"""Engines that come and go: of the service's own pool, and of a training run at the service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from relax_server.engines.process import EngineProcess
from relax_server.engines.settings import EngineSettings
from relax_server.models.catalog import resolve_model
from service_process import Service, start

HELLO = [{"role": "user", "content": "hello"}]
RUN: dict[str, Any] = {
    "env": "tone-v0",
    "config": {
        "steps": 100_000,
        "rollout": {"groups_per_step": 2, "group_size": 2},
        "sampling": {"max_new_tokens": 2},
        "warmup": {"steps": 0},
        "eval": {"every": 0},
    },
}


@pytest.fixture(scope="module")
def station(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of its own, as its engines come and go."""
    from relax_server.api.keys import KeyRing
    from relax_server.journal.sql import SqlJournal

    folder = tmp_path_factory.mktemp("station")
    journal = SqlJournal(folder / "journal.db")
    secret, _ = KeyRing(journal).create("root", ["admin"])
    journal.close()
    it = start(folder, "--drain-seconds", "1", key=secret)
    yield it
    it.stop()


def wait(look: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.2)
    return found


def refusal(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["message"]


async def test_an_engine_joins_the_service_and_leaves_it(station: Service, tmp_path: Path) -> None:
    path = resolve_model("relax/tiny-omni")
    engine, other = EngineProcess(path, tmp_path / "a"), EngineProcess(path, tmp_path / "b", EngineSettings(weight_version=5))
    await asyncio.gather(engine.start(), other.start())

    def play() -> None:
        with station.client() as client:
            first = client.get("/v1/engines").json()["engines"][0]["id"]
            assert refusal(client.delete(f"/v1/engines/{first}")) == (
                409,
                f"engine {first} is the last one, and stays; add another before",
            )
            added = client.post("/v1/engines", json={"url": engine.url, "token": engine.token})
            assert added.status_code == 201 and added.json()["state"] == "current"
            assert client.post("/v1/engines", json={"url": engine.url + "/"}).status_code == 200
            status, message = refusal(client.post("/v1/engines", json={"url": other.url, "token": other.token}))
            assert status == 409 and "holds weights of version 5; those in use are of version 0" in message
            assert refusal(client.post("/v1/engines", json={"url": "http://127.0.0.1:9"}))[0] == 503
            assert "is not this machine" in refusal(client.post("/v1/engines", json={"url": "http://example.org:80"}))[1]
            assert client.delete(f"/v1/engines/{first}?drain_seconds=5").status_code == 202
            wait(lambda: [row["id"] for row in client.get("/v1/engines").json()["engines"]] == [added.json()["id"]])
            assert client.delete(f"/v1/engines/{first}").json()["state"] == "gone"
            session = client.post("/v1/sessions", json={"sampling": {"max_new_tokens": 1}}).json()
            answer = client.post(f"{session['base_url']}/chat/completions", json={"messages": HELLO})
            assert answer.status_code == 200, answer.text
            assert client.get("/v1/engines").json()["engines"][0]["answered"] >= 1

    try:
        await asyncio.wait_for(asyncio.to_thread(play), 200)
        assert engine.alive()
    finally:
        await asyncio.gather(engine.stop(), other.stop())


@pytest.mark.nightly
def test_a_run_at_the_service_gets_an_engine_and_gives_it_back(station: Service) -> None:
    with station.client() as client:
        key = client.post("/v1/keys", json={"name": "somebody"}).json()["secret"]
        run = client.post("/v1/runs", json=RUN, headers={"Authorization": f"Bearer {key}"}).json()["id"]
        engines = f"/v1/runs/{run}/engines"
        assert refusal(client.get(engines))[1] == "the run is not under way, so it has no engines now"
        wait(lambda: client.get(engines).status_code == 200)
        status, message = refusal(client.post(engines, json={}, headers={"Authorization": f"Bearer {key}"}))
        assert status == 403 and "no right to admin" in message
        assert client.post(engines, json={"id": "two"}).status_code == 202
        wait(lambda: [row["state"] for row in client.get(engines).json()["engines"]] == ["current"] * 2)
        assert client.post(engines, json={"id": "two"}).status_code == 200
        assert refusal(client.post(engines, json={"id": "no/name"}))[0] == 400
        assert client.delete(f"{engines}/two?drain_seconds=10").status_code == 202
        wait(lambda: [row["id"] for row in client.get(engines).json()["engines"]] == ["e1"])
        assert client.delete(f"{engines}/two").json()["state"] == "gone"
        assert "is the last one" in refusal(client.delete(f"{engines}/e1"))[1]
        for name in ("three", "four", "five"):
            assert client.post(engines, json={"id": name}).status_code == 202
        assert refusal(client.post(engines, json={"id": "six"})) == (409, "the run has 4 engines; allowed here: at most 4")
        client.delete(f"/v1/runs/{run}")
        wait(lambda: client.get(f"/v1/runs/{run}").json()["state"] == "cancelled")
        assert refusal(client.get(engines))[0] in (409, 503)
    with station.client(key) as client:
        body = RUN | {"config": RUN["config"] | {"autoscale": {"max_engines": 9}}}
        assert "autoscale.max_engines = 9; allowed here: at most 4" in refusal(client.post("/v1/runs", json=body))[1]
