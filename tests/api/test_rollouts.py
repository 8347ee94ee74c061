"""Groups that the service plays by itself: submitted once, followed, cancelled, and gone on with after a kill -9."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import time
from pathlib import Path

import httpx
import pytest
from service_inside import service_inside
from service_process import Service, start

SMALL = {"env": "tone-v0", "group_size": 2, "sampling": {"max_new_tokens": 1}}


def submit(service: Service, *, idempotency_key: str | None = None, **changes) -> httpx.Response:
    headers = {"Idempotency-Key": idempotency_key} if idempotency_key else {}
    with service.client() as client:
        return client.post("/v1/rollouts", json=SMALL | changes, headers=headers)


def follow(service: Service, id: str, after: int = 0, until: int | None = None) -> list[tuple[int, str, dict]]:
    """Events of a rollout behind a number, until it is finished or so many came."""
    seen, seq, kind = [], 0, ""
    headers = {"Last-Event-ID": str(after)} | ({"Authorization": f"Bearer {service.key}"} if service.key else {})
    with httpx.stream("GET", f"{service.url}/v1/rollouts/{id}/events", headers=headers, timeout=60) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                seq = int(value)
            elif name == "event":
                kind = value
            elif name == "data":
                seen.append((seq, kind, json.loads(value)))
                if until is not None and len(seen) >= until:
                    break
    return seen


def test_groups_are_played_told_and_durable(service: Service) -> None:
    answer = submit(service, n=3)
    assert answer.status_code == 202
    rollout = answer.json()
    events = follow(service, rollout["id"])
    assert [kind for _, kind, _ in events] == ["queued", "running", "group", "group", "group", "finished"]
    groups = [data for _, kind, data in events if kind == "group"]
    assert sorted(g["task_index"] for g in groups) == [0, 1, 2] and all(len(g["trajectories"]) == 2 for g in groups)
    assert events[-1][2]["counts"] == {"groups": 3, "done": 3, "unusable": 0, "failed": 0, "trajectories": 6}
    with service.client() as client:
        state = client.get(f"/v1/rollouts/{rollout['id']}").json()
        assert (state["state"], state["counts"]["done"]) == ("completed", 3)
        played = client.get(f"/v1/trajectories/{groups[0]['trajectories'][0]['id']}").json()
        assert played["reward"] == groups[0]["trajectories"][0]["reward"] and len(played["turns"]) == 1
        assert rollout["id"] in [r["id"] for r in client.get("/v1/rollouts").json()["rollouts"]]
    middle = events[2][0]
    assert follow(service, rollout["id"], after=middle) == events[3:]


def test_an_idempotency_key_submits_once(service: Service) -> None:
    first = submit(service, idempotency_key="once", n=1)
    again = submit(service, idempotency_key="once", n=1)
    assert (first.status_code, again.status_code) == (202, 200) and first.json()["id"] == again.json()["id"]
    other = submit(service, idempotency_key="once", n=2)
    assert other.status_code == 409 and other.json()["error"]["code"] == "idempotency_conflict"


def test_the_same_seed_plays_the_same_episodes(service: Service) -> None:
    def seeds(seed: int) -> list[int]:
        rollout = submit(service, tasks=[7], seed=seed).json()
        ids = [t["id"] for _, kind, data in follow(service, rollout["id"]) if kind == "group" for t in data["trajectories"]]
        with service.client() as client:
            return sorted(client.get(f"/v1/trajectories/{id}").json()["seed"] for id in ids)

    assert seeds(1) == seeds(1) != seeds(2)


def test_a_rollout_is_cancelled_and_what_was_done_stays(service: Service) -> None:
    rollout = submit(service, n=2000, group_size=8, sampling={"max_new_tokens": 64, "ignore_eos": True}).json()
    follow(service, rollout["id"], until=3)
    with service.client() as client:
        ended = client.delete(f"/v1/rollouts/{rollout['id']}").json()
        assert ended["state"] == "cancelled" and 0 < ended["counts"]["done"] < 2000
        assert client.delete(f"/v1/rollouts/{rollout['id']}").json()["state"] == "cancelled"
    events = follow(service, rollout["id"])
    assert events[-1][1] == "finished" and sum(kind == "group" for _, kind, _ in events) == ended["counts"]["done"]


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"env": "no-such"}, 404, "tone-v0"),
        ({"split": "nope"}, 400, "eval"),
        ({"tasks": [1, 1]}, 400, "once"),
        ({"tasks": [-1]}, 400, "tasks"),
        ({"group_size": 0}, 400, "group_size"),
        ({"sampling": {"temperature": -3}}, 400, "temperature"),
        ({"limits": {"episode_timeout": 0}}, 400, "episode_timeout"),
        ({"surprise": 1}, 400, "surprise"),
    ],
)
def test_what_cannot_be_played_is_refused_at_once(service: Service, changes, status, says) -> None:
    answer = submit(service, **changes)
    assert answer.status_code == status and says in answer.json()["error"]["message"], answer.text


def test_a_killed_service_goes_on_where_it_was(tmp_path: Path, service: Service) -> None:
    """Groups that were told are there, none is told or kept twice, and the stream goes on behind the last event."""
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    it = start(tmp_path / "service", "--engine", engine)
    rollout = submit(it, n=300).json()
    told = follow(it, rollout["id"], until=6)
    it.process.send_signal(signal.SIGKILL)
    it.process.wait()
    port = it.url.rsplit(":", 1)[1]
    began = time.monotonic()
    it = start(tmp_path / "service", "--engine", engine, port=int(port))
    assert time.monotonic() - began < 60
    rest = follow(it, rollout["id"], after=told[-1][0])
    groups = [data["id"] for _, kind, data in told + rest if kind == "group"]
    assert len(groups) == len(set(groups)) == 300 and rest[-1][1] == "finished"
    with it.client() as client:
        counts = client.get(f"/v1/rollouts/{rollout['id']}").json()["counts"]
    assert counts == {"groups": 300, "done": 300, "unusable": 0, "failed": 0, "trajectories": 600}
    it.stop()


@pytest.mark.nightly
def test_hundreds_of_thousands_of_episodes_are_begun_and_cancelled_beside_others(tmp_path: Path, service: Service) -> None:
    """A request for 64 groups of 4096 episodes begins one group at a time; others are answered while it begins and while it is
    cancelled, which is answered at once."""
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    it = start(tmp_path, "--engine", engine, "--drain-seconds", "0")

    def read(name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def begun(*states: str) -> float:
        return sum(read(f'relax_episode_states{{state="{state}"}}') for state in states)

    try:
        with httpx.Client(base_url=it.url, timeout=20.0) as client:
            many = {"env": "higher-lower-v0", "n": 64, "group_size": 4096, "sampling": {"max_new_tokens": 32}}
            id = client.post("/v1/rollouts", json=many).json()["id"]
            while begun("queued", "resetting", "running", "scoring", "completed") < 4096:
                assert client.get(f"/v1/rollouts/{id}").json()["state"] in ("queued", "running")
            assert begun("queued", "resetting", "running") <= 2 * 4096, (
                "no more are begun than there are places, but for the last group"
            )
            assert client.delete(f"/v1/rollouts/{id}").json()["state"] == "cancelled"
            while read("relax_episodes_running") or read("relax_rollouts_playing"):
                assert client.get("/healthz").json() == {"status": "ok"}
            again = client.post("/v1/rollouts", json=SMALL | {"n": 1}).json()["id"]
            assert follow(it, again)[-1][2]["state"] == "completed"
    finally:
        it.stop()


async def test_a_key_may_have_so_many_rollouts_that_are_not_over(processor, tmp_path) -> None:
    async with service_inside(processor, tmp_path) as it:
        it.core.config = dataclasses.replace(it.core.config, max_rollouts=2)
        it.core.gate.clear()

        async def submit(word: str) -> httpx.Response:
            body = {"env": "higher-lower-v0", "n": 1}
            return await it.http.post("/v1/rollouts", json=body, headers={"Idempotency-Key": word})

        submitted = [await submit(word) for word in "abca"]
        assert [answer.status_code for answer in submitted] == [202, 202, 429, 200]
        assert submitted[2].json()["error"]["code"] == "rollouts" and submitted[2].headers["Retry-After"]
        assert submitted[3].json()["id"] == submitted[0].json()["id"], "what is repeated is no further one"
        assert (await it.http.delete(f"/v1/rollouts/{submitted[1].json()['id']}")).status_code == 200
        assert (await submit("c")).status_code == 202
