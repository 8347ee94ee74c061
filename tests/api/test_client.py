"""`relax.Client` and `relax.AsyncClient` against a real service."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
from service_process import Service

import relax_sdk as relax
from relax_sdk.client import AsyncRemoteSession, AsyncRollout, RemoteSession, Rollout

ONE = {"sampling": {"max_new_tokens": 1}}


def test_an_episode(service: Service) -> None:
    with relax.Client(service.url) as client, client.session("tone-v0", **ONE) as session:
        answer = session.chat(session.observation)
        step = session.step(answer)
        session.reward(0.5, "style")
        done = session.finish()
        played = session.trajectory()
    assert step.terminated and done.status == "completed" and done.rewards == {"env": step.reward, "style": 0.5}
    assert isinstance(played, relax.Trajectory) and played.status is relax.Status.COMPLETED
    assert played.id == session.trajectory_id and len(played.turns[0].response_ids) == 1
    assert played.samples()[0].loss_mask[-1] == 1
    sampling = played.turns[0].sampling
    assert isinstance(sampling, relax.SamplingParams) and sampling.sampling_seed is not None
    with relax.Client(service.url) as client:
        assert client.media(played.turns[0].media[0].sha256)[:4] == b"RIFF"
        assert "tone-v0" in [env["id"] for env in client.envs()] and client.models()["data"]


def test_messages_of_the_sdk_and_media(service: Service) -> None:
    picture = relax.Image.from_array(np.full((32, 32, 3), 7, np.uint8))
    with relax.Client(service.url) as client, client.session(**ONE) as session:
        ref = client.put_media(picture)
        assert ref == picture.ref
        session.chat([relax.Message("user", (picture, relax.Text("what?")))])
        by_name = {"type": "image_url", "image_url": {"url": f"relax-media:{ref.sha256}"}}
        session.chat([{"role": "user", "content": [by_name, {"type": "text", "text": "what?"}]}])
        session.finish()
        one, two = session.trajectory().turns
    assert one.media == two.media == [ref] and one.prompt_ids == two.prompt_ids


def test_a_rollout(service: Service) -> None:
    with relax.Client(service.url) as client:
        rollout = client.rollout("tone-v0", n=2, group_size=2, idempotency_key="client", **ONE)
        kinds = [event.kind for event in rollout.events()]
        assert kinds[-3:] == ["group", "group", "finished"] and rollout.wait().counts["done"] == 2
        assert client.rollout("tone-v0", n=2, group_size=2, idempotency_key="client", **ONE).id == rollout.id
        assert client.get_rollout(rollout.id).state.over


async def test_the_same_in_asyncio(service: Service) -> None:
    async with relax.AsyncClient(service.url) as client:

        async def episode(task: int) -> float:
            async with await client.session("tone-v0", task_index=task, **ONE) as session:
                step = await session.step(await session.chat(session.observation))
                assert (await session.finish()).reward == step.reward
                return step.reward

        assert len(await asyncio.gather(*(episode(task) for task in range(8)))) == 8
        rollout = await client.rollout("tone-v0", n=1, **ONE)
        assert (await rollout.wait()).state == "completed"


def test_leaving_a_session_after_an_error_cancels_it(service: Service) -> None:
    with relax.Client(service.url) as client:
        with pytest.raises(KeyError), client.session(**ONE) as session:
            session.chat([{"role": "user", "content": "x"}])
            raise KeyError("agent")
        with pytest.raises(relax.ServiceError, match=r"is over .cancelled"):
            session.chat([{"role": "user", "content": "x"}])


def test_leaving_a_session_at_its_limit_finishes_it(service: Service) -> None:
    with relax.Client(service.url) as client:
        with (
            pytest.raises(relax.ServiceError, match="max_turns = 1"),
            client.session("tone-v0", limits={"max_turns": 1}, **ONE) as session,
        ):
            for text in "xy":
                session.chat([{"role": "user", "content": text}])
        assert session.finished is not None and session.finished.status == "truncated"
        assert len(session.trajectory().turns) == 1


async def test_leaving_a_session_at_its_limit_finishes_it_in_asyncio(service: Service) -> None:
    async with relax.AsyncClient(service.url) as client:
        session = await client.session("tone-v0", limits={"max_turns": 1}, **ONE)
        with pytest.raises(relax.ServiceError, match="max_turns = 1"):
            async with session:
                for text in "xy":
                    await session.chat([{"role": "user", "content": text}])
        assert session.finished is not None and session.finished.status == "truncated"


def test_errors_are_the_service_s_words(service: Service) -> None:
    with relax.Client(service.url) as client:
        with pytest.raises(relax.ServiceError, match=r"no environment 'nope'.*tone-v0") as caught:
            client.session("nope")
        assert (caught.value.status, caught.value.code) == (404, "environment_not_found")
        with pytest.raises(relax.ServiceError, match="no trajectory"):
            client.trajectory("a/b")
        with pytest.raises(relax.MediaError):
            client.put_media(relax.Image.from_bytes(b"x"))


def test_a_service_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_sdk.client.sync.pause", lambda *_: 0.0)
    with relax.Client("http://127.0.0.1:9") as client, pytest.raises(relax.ServiceUnavailable, match="relax serve"):
        client.envs()


@pytest.fixture
def flaky() -> Iterator[tuple[str, list[str]]]:
    """A server that is busy twice, then breaks a stream off twice; and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers.get('Last-Event-ID', '')}".strip())
            if self.path.endswith("/events"):
                first = int(self.headers["Last-Event-ID"]) + 1
                body = b"".join(
                    f": ping\n\nid: {i}\nevent: {'finished' if i == 5 else 'group'}\ndata: {{}}\n\n: ping\n\n".encode()
                    for i in range(first, min(first + 2, 6))
                )
                self.answer(200, body, "text/event-stream")
            elif len(asked) < 3:
                self.answer(503, b'{"error": {"message": "busy", "code": "busy"}}')
            else:
                self.answer(200, b'{"envs": [], "id": "r", "state": "running", "counts": {}, "error": null}')

        do_POST = do_GET

        def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def test_what_is_safe_is_repeated(flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_sdk.client.sync.pause", lambda *_: 0.0)
    url, asked = flaky
    with relax.Client(url) as client:
        assert client.envs() == [] and len(asked) == 3


def test_streams_go_on_where_they_broke_off(flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_sdk.client.sync.pause", lambda *_: 0.0)
    url, asked = flaky
    with relax.Client(url) as client:
        events = list(client.get_rollout("r").events())
    assert [event.id for event in events] == [1, 2, 3, 4, 5] and events[-1].kind == "finished"
    assert [line for line in asked if "events" in line] == [f"/v1/rollouts/r/events {n}" for n in (0, 2, 4)]


async def test_streams_go_on_in_asyncio_too(flaky, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_sdk.client.aio.pause", lambda *_: 0.0)
    url, asked = flaky
    async with relax.AsyncClient(url) as client:
        events = [event async for event in (await client.get_rollout("r")).events()]
    assert [event.id for event in events] == [1, 2, 3, 4, 5] and events[-1].kind == "finished"
    assert [line for line in asked if "events" in line] == [f"/v1/rollouts/r/events {n}" for n in (0, 2, 4)]


def test_both_clients_have_the_same_names() -> None:
    for sync, aio in ((relax.Client, relax.AsyncClient), (RemoteSession, AsyncRemoteSession), (Rollout, AsyncRollout)):
        ours = {name for name in vars(sync) if not name.startswith("_")}
        assert ours == {name for name in vars(aio) if not name.startswith("_")}
        for name in ours:
            assert (
                inspect.signature(getattr(sync, name)).parameters.keys()
                == inspect.signature(getattr(aio, name)).parameters.keys()
            )
