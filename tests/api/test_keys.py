"""Keys, rights, quotas and fair shares."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from relax_server.api.holding import Holding
from relax_server.api.keys import Key, KeyRing
from relax_server.api.quotas import TOKENS, FairSlots, KeyRates
from relax_server.api.settings import ServiceConfig
from relax_server.api.trainings.store import Training, TrainingStore
from relax_server.gateway.errors import ApiError
from relax_server.journal.sql import SqlJournal
from sample_groups import ManualClock, make_group
from service_process import Service, start
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import relax_sdk as relax
from relax_sdk.media import Image
from relax_sdk.run_lock import Holder

HELLO = [{"role": "user", "content": "hello"}]


def make_key(service: Service, **body) -> dict:
    with service.client() as client:
        answer = client.post("/v1/keys", json={"name": "test"} | body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def test_no_key_no_answer(locked: Service) -> None:
    with locked.client("") as client:
        for method, path in (("GET", "/v1/envs"), ("POST", "/v1/sessions"), ("GET", "/v1/trajectories/x"), ("GET", "/v1/keys")):
            answer = client.request(method, path, json={} if method == "POST" else None)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error", path
        assert client.get("/healthz").status_code == 200
    with locked.client("rlx_wrong") as client:
        assert "unknown, revoked or expired" in client.get("/v1/envs").json()["error"]["message"]


def test_rights(locked: Service) -> None:
    key = make_key(locked, rights=["run"])
    with locked.client(key["secret"]) as client:
        assert client.get("/v1/envs").status_code == 200
        refused = client.get("/v1/keys")
        assert refused.status_code == 403 and "no right to admin" in refused.json()["error"]["message"]


def test_another_key_s_session_is_as_good_as_unknown(locked: Service) -> None:
    mine, other = make_key(locked), make_key(locked)
    with locked.client(mine["secret"]) as client:
        session = client.post("/v1/sessions", json={}).json()
        rollout = client.post("/v1/rollouts", json={"env": "tone-v0", "n": 1}).json()
    with locked.client(other["secret"]) as client:
        assert client.get(f"/v1/sessions/{session['id']}").status_code == 404
        assert client.get(f"/v1/rollouts/{rollout['id']}").status_code == 404
        assert session["id"] not in str(client.get("/v1/sessions").json())
    with locked.client(session["key"]) as client:
        assert client.get(f"/v1/sessions/{session['id']}").status_code == 200
        assert client.get("/v1/envs").status_code == 401, "a session's key opens nothing else"
    with locked.client() as client:
        assert client.get(f"/v1/sessions/{session['id']}").status_code == 200, "an admin sees it"


def test_another_key_s_trajectory_is_as_good_as_unknown(locked: Service) -> None:
    mine, other = make_key(locked), make_key(locked)
    with locked.client(mine["secret"]) as client:
        session = client.post("/v1/sessions", json={"env": "colour-v0", "sampling": {"max_new_tokens": 1}}).json()
        client.post(f"{session['base_url']}/chat/completions", json={"messages": session["observation"]})
        assert client.post(f"/v1/sessions/{session['id']}/finish").status_code == 200
        rollout = client.post("/v1/rollouts", json={"env": "tone-v0", "n": 1, "sampling": {"max_new_tokens": 1}}).json()
        with client.stream("GET", f"/v1/rollouts/{rollout['id']}/events") as stream:
            assert "event: finished" in list(stream.iter_lines())
        ids = [session["trajectory_id"], f"{rollout['id']}/train/0/0"]
        for id in ids:
            assert (found := client.get(f"/v1/trajectories/{id}")).status_code == 200, found.text
        media = client.get(f"/v1/trajectories/{ids[0]}").json()["turns"][0]["media"][0]["sha256"]
    with locked.client() as client:
        assert all(client.get(f"/v1/trajectories/{id}").status_code == 200 for id in ids), "an admin reads all"
    with locked.client(other["secret"]) as client:
        for id in ids:
            refused, nothing = client.get(f"/v1/trajectories/{id}"), client.get(f"/v1/trajectories/{id}x")
            assert refused.status_code == nothing.status_code == 404
            assert refused.json()["error"]["message"] + "x" == nothing.json()["error"]["message"].replace("x'", "'x")
        assert client.get(f"/v1/media/{media}").status_code == 200, "whoever knows the hash of the bytes may have them"


def test_without_keys_everything_is_read_and_with_the_first_one_only_what_is_its_own(tmp_path: Path, service: Service) -> None:
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    journal = SqlJournal(tmp_path / "journal.db")
    journal.commit(make_group("of-a-run"), "run-1")
    it = start(tmp_path, "--engine", engine, "--drain-seconds", "0")
    try:
        session = it.open(sampling={"max_new_tokens": 1})
        with it.client() as client:
            client.post(f"{session['base_url']}/chat/completions", json={"messages": HELLO})
            assert client.post(f"/v1/sessions/{session['id']}/finish").status_code == 200
            for id in (session["trajectory_id"], "of-a-run-0"):
                assert client.get(f"/v1/trajectories/{id}").status_code == 200
        admin, run = (KeyRing(journal).create("x", [right])[0] for right in ("admin", "run"))
        with it.client(run) as client:
            end = time.monotonic() + 30
            while client.get(f"/v1/trajectories/{session['trajectory_id']}").status_code == 200:
                assert time.monotonic() < end
                time.sleep(0.2)
            for id in (session["trajectory_id"], "of-a-run-0"):
                assert client.get(f"/v1/trajectories/{id}").status_code == 404
        with it.client(admin) as client:
            for id in (session["trajectory_id"], "of-a-run-0"):
                assert client.get(f"/v1/trajectories/{id}").status_code == 200
    finally:
        it.stop()
        journal.close()


def test_the_session_s_key_alone_names_the_session(locked: Service) -> None:
    with locked.client() as client:
        session = client.post("/v1/sessions", json={"sampling": {"max_new_tokens": 2}}).json()
    agent = openai.OpenAI(base_url=f"{locked.url}/v1/openai/v1", api_key=session["key"], max_retries=0)
    assert agent.chat.completions.create(model="x", messages=HELLO).choices
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{locked.url}/v1/openai/v1", api_key="no", max_retries=0).chat.completions.create(
            model="x", messages=HELLO
        )


def test_episodes_and_tokens_are_limited(locked: Service) -> None:
    few = make_key(locked, episodes=1)
    with locked.client(few["secret"]) as client:
        first = client.post("/v1/sessions", json={}).json()
        refused = client.post("/v1/sessions", json={})
        assert refused.status_code == 429 and "Retry-After" in refused.headers
        client.delete(f"/v1/sessions/{first['id']}")
        assert client.post("/v1/sessions", json={}).status_code == 201
    slow = make_key(locked, tokens_per_minute=3)
    with locked.client(slow["secret"]) as client:
        session = client.post("/v1/sessions", json={"sampling": {"max_new_tokens": 8, "ignore_eos": True}}).json()
    agent = openai.OpenAI(base_url=session["base_url"], api_key=session["key"], max_retries=0)
    agent.chat.completions.create(model="x", messages=HELLO)
    with pytest.raises(openai.RateLimitError, match="3 tokens a minute; try again in"):
        agent.chat.completions.create(model="x", messages=HELLO)


async def test_openings_at_once_are_limited_as_one_after_the_other(locked: Service) -> None:
    few = make_key(locked, episodes=4)
    headers = {"Authorization": f"Bearer {few['secret']}"}
    async with httpx.AsyncClient(base_url=locked.url, headers=headers, timeout=60.0) as client:
        answers = await asyncio.gather(*(client.post("/v1/sessions", json={"env": "tone-v0"}) for _ in range(12)))
    assert sorted(answer.status_code for answer in answers) == [201] * 4 + [429] * 8


def test_rollouts_are_charged_for_their_tokens(locked: Service) -> None:
    """Eight episodes of one answer each may be played together, but their key has tokens for two in a minute."""
    slow = make_key(locked, tokens_per_minute=10)
    sampling = {"max_new_tokens": 5, "ignore_eos": True}
    with locked.client(slow["secret"]) as client:
        rollout = client.post("/v1/rollouts", json={"env": "tone-v0", "n": 8, "sampling": sampling}).json()
        path = f"/v1/rollouts/{rollout['id']}"
        end = time.monotonic() + 60
        while client.get(path).json()["counts"]["done"] < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
        refused = client.post("/v1/sessions", json={})
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "tokens_per_minute"
        assert client.delete(path).json()["counts"]["done"] < 8


def test_new_media_are_charged_by_the_byte_and_refused_ones_are_not(locked: Service) -> None:
    pictures = [Image.from_array(np.full((8, 8, 3), shade, np.uint8)).bytes() for shade in range(3)]
    few = make_key(locked, media_bytes_per_day=len(pictures[0]) + 1)
    with locked.client(few["secret"]) as client:

        def put(data: bytes) -> httpx.Response:
            return client.post("/v1/media/image", content=data, headers={"Content-Type": "image/png"})

        assert put(pictures[0][:40]).status_code == 400
        assert [put(data).status_code for data in pictures] == [201, 201, 429]
        refused = put(pictures[2])
        assert refused.json()["error"]["code"] == "media_bytes_per_day" and int(refused.headers["Retry-After"]) > 60
        assert put(pictures[0]).status_code == 201, "what is stored already costs nothing"


def test_pictures_of_episodes_are_charged_as_those_that_are_sent(locked: Service) -> None:
    few = make_key(locked, media_bytes_per_day=1)
    with locked.client(few["secret"]) as client:
        opened = [client.post("/v1/sessions", json={"env": "colour-v0", "seed": seed}) for seed in range(3)]
    assert opened[0].status_code == 201 and opened[-1].status_code == 429, [answer.text for answer in opened]
    assert "has used its 1 bytes of new media a day" in opened[-1].json()["error"]["message"]


def test_the_name_of_a_run_belongs_to_the_key_that_used_it_first(locked: Service) -> None:
    one, other = make_key(locked), make_key(locked)
    small = {"sampling": {"max_new_tokens": 1}}
    with locked.client(one["secret"]) as client:
        mine = client.post("/v1/sessions", json=small | {"run": f"run-{one['id']}"}).json()
        rollout = {"env": "tone-v0", "n": 1, "run": f"rollout-{one['id']}"} | small
        assert client.post("/v1/rollouts", json=rollout).status_code == 202
        plain = client.post("/v1/sessions", json=small).json()
    for key in (other["secret"], None):
        with locked.client(key) as client:
            for name in (f"run-{one['id']}", f"rollout-{one['id']}", plain["trajectory_id"].partition("/")[0]):
                answers = [
                    client.post("/v1/sessions", json={"run": name}),
                    client.post("/v1/rollouts", json=rollout | {"run": name}),
                ]
                for answer in answers:
                    assert answer.status_code == 409 and answer.json()["error"]["code"] == "run_taken", answer.text
            theirs = client.post("/v1/sessions", json=small).json()
            assert theirs["trajectory_id"].partition("/")[0] != plain["trajectory_id"].partition("/")[0]
    with locked.client(one["secret"]) as client:
        again = client.post("/v1/sessions", json=small | {"run": f"run-{one['id']}"})
        assert again.status_code == 201 and mine["trajectory_id"].startswith(f"run-{one['id']}/")


def test_training_runs_are_limited(tmp_path: Path) -> None:
    journal = SqlJournal(tmp_path / "journal.db")
    _, key = KeyRing(journal).create("few", runs=2)
    store = TrainingStore(journal, "here", Holding("training", Holder.here()))

    def submit(id: str, word: str | None = None, key: Key = key) -> tuple[Training, bool]:
        row = dict(id=id, key=key.id, idempotency_key=word, step=0, request={"id": id}, state="queued", created_at=1.0)
        return store.insert(row, key)

    first, second = submit("one", "word")[0], submit("two")[0]
    for refused in (lambda: submit("three"), lambda: store.reopen(second, key)):
        with pytest.raises(ApiError, match="key 'few' has 2 training runs under way already") as caught:
            refused()
        assert caught.value.status == 429 and caught.value.headers["Retry-After"]
    assert submit("again", "word") == (first, False), "repeating a request is no further run"
    assert submit("other", key=KeyRing(journal).create("other")[1])[1]
    second.state = "cancelled"
    store.note(second)
    assert submit("three")[1]
    journal.close()


def test_a_revoked_key_ends(locked: Service) -> None:
    key = make_key(locked)
    with locked.client() as client:
        assert key["id"] in str(client.get("/v1/keys").json())
        assert client.delete(f"/v1/keys/{key['id']}").json()["revoked"] is True
        assert client.delete(f"/v1/keys/{key['id']}").status_code == 404
    with locked.client(key["secret"]) as client:
        assert client.get("/v1/envs").status_code == 401


def test_keys_are_hashed_at_rest_and_expire(tmp_path: Path) -> None:
    clock = ManualClock()
    journal = SqlJournal(tmp_path / "journal.db")
    ring = KeyRing(journal, clock)
    secret, key = ring.create("a", lifetime=60.0)
    journal.engine.dispose()
    for file in tmp_path.iterdir():
        assert secret.encode() not in file.read_bytes()
    assert ring.find(secret) == key and ring.any_works()
    clock.advance(61)
    assert ring.find(secret) is None and ring.by_id(key.id) is None and not ring.any_works()
    assert ring.any(), "a service that had a key once is not open to all"
    for wrong in (dict(rights=["fly"]), dict(rights=[]), dict(episodes=0), dict(tokens_per_minute=0), dict(lifetime=0)):
        with pytest.raises(relax.ConfigError, match="key"):
            ring.create("b", **wrong)
    journal.close()
    assert sqlite3.connect(tmp_path / "journal.db").execute("select count(*) from keys").fetchone() == (1,)


def test_a_clock_that_is_set_back_prolongs_no_key(tmp_path: Path) -> None:
    clock, elapsed = ManualClock(), ManualClock(0.0)
    journal = SqlJournal(tmp_path / "journal.db")
    ring = KeyRing(journal, clock, elapsed)
    (revoked, key), (expiring, _) = ring.create("a"), ring.create("b", lifetime=60.0)
    assert ring.find(revoked) and ring.known(revoked) and ring.find(expiring) and ring.known(expiring)
    clock.advance(-3600)
    elapsed.advance(61)
    KeyRing(journal).revoke(key.id)  # as the command does, in another process
    assert ring.known(revoked) is None and ring.find(revoked) is None, "it is asked for again by elapsed time"
    assert ring.known(expiring) is None and ring.find(expiring) is None, "and its time is over"
    journal.close()


def test_no_keys_is_for_this_machine_alone() -> None:
    with pytest.raises(relax.ConfigError, match=r"no_keys = True with host = 0\.0\.0\.0"):
        ServiceConfig(Path("x"), host="0.0.0.0", no_keys=True)


def test_what_had_a_key_once_opens_without_one_only_when_it_is_told_to(tmp_path: Path, service: Service) -> None:
    """Its only key is revoked, and the service started again: nobody gets in, and it says what to do; with --no-keys anybody
    plays, and still sees nothing that belongs to a key."""
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    journal = SqlJournal(tmp_path / "journal.db")
    ring = KeyRing(journal)
    secret, key = ring.create("was")
    journal.commit(make_group("hers"), "her-run", owner=key.id)
    journal.commit(make_group("of-a-run"), "run-1")
    ring.revoke(key.id)
    it = start(tmp_path, "--engine", engine, "--drain-seconds", "0")
    try:
        for shown in ("", secret):
            with it.client(shown) as client:
                assert client.get("/v1/envs").status_code == client.get("/v1/trajectories/hers-0").status_code == 401
        assert "all were revoked or have expired: make one with `relax keys add" in (tmp_path / "serve.log").read_text()
    finally:
        it.stop()
    it = start(tmp_path, "--engine", engine, "--drain-seconds", "0", "--no-keys")
    try:
        with it.client() as client:
            assert client.get("/v1/envs").status_code == 200 == client.get("/v1/trajectories/of-a-run-0").status_code
            assert client.get("/v1/trajectories/hers-0").status_code == 404
        with it.client(ring.create("root", ["admin"])[0]) as client:
            assert client.get("/v1/trajectories/hers-0").status_code == 200, "a key that is shown counts"
        assert "no keys wanted (--no-keys)" in (tmp_path / "serve.log").read_text()
    finally:
        it.stop()
        journal.close()


def test_another_address_than_this_machine_s_wants_a_key(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "relax_sdk.cli", "serve", "--host", "0.0.0.0", "--port", "0", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "relax keys add NAME" in done.stderr


def test_the_first_key_closes_a_service_that_runs(tmp_path: Path, service: Service) -> None:
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    it = start(tmp_path, "--engine", engine)
    try:
        with it.client() as client, connect(it.url.replace("http", "ws") + "/v1/sessions/ws") as socket:
            assert client.get("/v1/envs").status_code == 200
            journal = SqlJournal(tmp_path / "journal.db")
            KeyRing(journal).create("first")
            journal.close()
            end = time.monotonic() + 30
            while client.get("/v1/envs").status_code != 401:
                assert time.monotonic() < end
                time.sleep(0.2)
            with pytest.raises(ConnectionClosed, match="wants keys now"):
                socket.recv(timeout=30)
    finally:
        it.stop()


def test_the_keys_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "relax_sdk.cli", "keys", *arguments, "--folder", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    secret = run("add", "me", "--rights", "run,upload").stdout.strip()
    assert secret.startswith("rlx_")
    line = run("list").stdout
    assert "me  run, upload" in line and "works" in line and secret not in line
    assert run("revoke", line.split()[0]).returncode == 0 and "revoked" in run("list").stdout
    assert run("add", "x", "--rights", "fly").returncode == 1


def test_token_rates_fill_up_steadily() -> None:
    clock = ManualClock(0.0)
    rates, key = KeyRates(TOKENS, clock), Key("k", "k", frozenset(), 1, tokens_per_minute=60)
    rates.check(key)
    rates.take(key, 90)
    with pytest.raises(ApiError, match="try again in 31 s"):
        rates.check(key)
    clock.advance(31)
    rates.check(key)


async def test_a_free_place_goes_to_the_key_that_has_fewest() -> None:
    slots, order = FairSlots(2), []

    async def episode(key: str) -> None:
        place = slots.of(key, 10)
        await place.acquire()
        order.append(key)
        await asyncio.sleep(0.01)
        place.release()

    await asyncio.gather(*(episode("greedy") for _ in range(20)), *(episode("modest") for _ in range(3)))
    assert order.index("modest") <= 2 and [k for k in order[:7]].count("modest") == 3
    assert not slots.running and not slots.waiting


async def test_among_keys_that_have_as_many_a_place_goes_to_the_one_that_was_served_longest_ago() -> None:
    slots, order = FairSlots(1), []

    async def episode(key: str) -> None:
        await slots.acquire(key, 10)
        order.append(key)
        await asyncio.sleep(0)
        slots.release(key)

    await asyncio.gather(*(episode(key) for key in "aaaabbcc"))
    assert "".join(order) == "abcabcaa"
    assert not slots.running and not slots.waiting and not slots._served


async def test_a_key_s_limit_and_cancelled_waits() -> None:
    slots = FairSlots(10)
    one = slots.of("a", 1)
    await one.acquire()
    waiting = asyncio.create_task(one.acquire())
    other = asyncio.create_task(slots.of("b", 1).acquire())
    await asyncio.sleep(0)
    assert not waiting.done() and other.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    one.release()
    await asyncio.wait_for(one.acquire(), 1)
    assert slots.running == {"a": 1, "b": 1} and not slots.waiting
