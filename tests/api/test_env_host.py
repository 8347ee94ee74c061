"""Environments that stay in this process and are stepped by the service."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import hosted_envs
import pytest
import websockets.sync.client as ws
from service_process import Service, start

import relax_sdk as relax
from relax_sdk.hosting.protocol import Description, Hello, Refused, Reply, Reset, Welcome, encode, read_from_service

ONE = {"sampling": {"max_new_tokens": 1}}


@pytest.fixture
def client(service: Service) -> Iterator[relax.Client]:
    with relax.Client(service.url) as it:
        yield it


class Counter(relax.Env):
    """Shares memory with whoever hosts it, as a notebook's cell does."""

    steps = 0

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.index = (options or {})["task"]["index"]
        return f"task {self.index}", {}

    async def step(self, action: relax.AssistantMessage) -> Any:
        Counter.steps += 1
        return None, float(self.index), True, False, {}


def test_an_environment_of_this_process_is_played_there(service: Service, client: relax.Client) -> None:
    Counter.steps = 0
    tasks = {"train": ({"index": i} for i in itertools.count()), "eval": [{"index": 7}]}
    with relax.host(Counter, service.url, id="counter", tasks=tasks):
        row = next(env for env in client.envs() if env["id"] == "counter")
        assert (row["kind"], row["connected"], row["splits"]) == ("hosted", True, {"train": None, "eval": 1})
        with client.session("counter", split="eval", **ONE) as session:
            assert session.observation[0]["content"] == "task 7"
            session.step(session.chat(session.observation))
            assert session.finish().reward == 7.0
        rollout = client.rollout("counter", n=4, group_size=3, **ONE)
        assert rollout.wait().counts == {"groups": 4, "done": 4, "unusable": 0, "failed": 0, "trajectories": 12}
    assert Counter.steps == 13
    with pytest.raises(relax.ServiceError, match=r"no environment 'counter'|is gone"):
        client.session("counter")


def test_media_and_rewards_of_a_hosted_environment(service: Service, client: relax.Client) -> None:
    with relax.host(hosted_envs.Grouped, service.url, id="hosted-pictures"):
        rollout = client.rollout("hosted-pictures", n=2, group_size=3, **ONE)
        groups = [event.data["trajectories"] for event in rollout.events() if event.kind == "group"]
        assert [sorted(t["rewards"]["best"] for t in group) for group in groups] == [[0.0, 1.0, 2.0]] * 2
        played = client.trajectory(groups[0][0]["id"])
        assert client.media(played.turns[0].media[0].sha256)[:4] == b"\x89PNG"


def test_a_broken_connection_is_made_again_and_the_episode_goes_on(service: Service, client: relax.Client) -> None:
    hosting = relax.host(hosted_envs.Echo, service.url, id="flaky")
    with hosting, client.session("flaky", **ONE) as session:
        answer = session.chat(session.observation)
        first = session.step("A")
        assert hosting._loop is not None
        asyncio.run_coroutine_threadsafe(_cut(hosting), hosting._loop).result(10)
        session.chat([*session.observation, answer, *first.observation])
        assert session.step("B").terminated
        assert session.finish().rewards == {"env": 0.5, "length": 2.0}


async def _cut(hosting: relax.Hosting) -> None:
    """Drop the connection as a network does."""
    assert hosting._socket is not None
    hosting._socket.transport.abort()


def test_a_name_that_is_taken(service: Service) -> None:
    with relax.host(Counter, service.url, id="taken"):
        with pytest.raises(relax.ServiceError, match="hosted by another process"):
            relax.host(Counter, service.url, id="taken")
        with pytest.raises(relax.ServiceError, match="installed"):
            relax.host(Counter, service.url, id="tone-v0")


def test_a_service_that_is_not_there_or_wants_a_key(locked: Service) -> None:
    with pytest.raises(relax.ServiceUnavailable, match="cannot be reached"):
        relax.host(Counter, "http://127.0.0.1:9")
    with pytest.raises(relax.ServiceError, match="right to run"):
        relax.host(Counter, locked.url)
    with relax.host(Counter, locked.url, locked.key) as hosting:
        assert hosting.id == "Counter"


class Bad(relax.Env):
    def __init__(self) -> None:
        raise RuntimeError("no camera")


def test_an_environment_that_cannot_be_made(service: Service) -> None:
    with pytest.raises(RuntimeError, match="no camera"):
        relax.host(Bad, service.url)


class Slow(Counter):
    async def step(self, action: relax.AssistantMessage) -> Any:
        await asyncio.sleep(600)


def test_a_step_that_takes_too_long(service: Service, client: relax.Client) -> None:
    with relax.host(Slow, service.url, id="slow"), client.session("slow", **ONE, limits={"step_timeout": 0.3}) as session:
        session.chat(session.observation)
        with pytest.raises(relax.ServiceError, match=r"longer than 0.3 s"):
            session.step("A")


def test_a_host_that_is_closed_fails_its_episodes(service: Service, client: relax.Client) -> None:
    hosting = relax.host(Slow, service.url, id="leaving")
    session = client.session("leaving", **ONE)
    session.chat(session.observation)
    threading.Timer(0.5, hosting.close).start()
    with pytest.raises(relax.ServiceError, match="the host of environment leaving is gone"):
        session.step("A")


def test_when_the_service_starts_again_the_host_comes_back(tmp_path, service: Service) -> None:
    with service.client() as http:
        engine = http.get("/v1/models").json()["engines"][0]["url"]
    one = start(tmp_path, "--engine", engine)
    port = int(one.url.rpartition(":")[2])
    with relax.host(hosted_envs.Echo, one.url, id="faithful") as hosting:
        one.process.kill()
        one.process.wait(30)
        two = start(tmp_path, "--engine", engine, port=port)
        try:
            with relax.Client(two.url) as client:
                _until(lambda: any(env["id"] == "faithful" for env in client.envs()))
                with client.session("faithful", **ONE) as session:
                    assert len(session.observation) == 2
        finally:
            two.stop()
        with pytest.raises(TimeoutError):
            hosting.wait(0.1)


def _until(ready: Any) -> None:
    for _ in range(600):
        if ready():
            return
        threading.Event().wait(0.05)
    raise AssertionError("not in time")


def _raw(service: Service) -> Any:
    return ws.connect("ws" + service.url.removeprefix("http") + "/v1/env-host", max_size=None)


@pytest.mark.parametrize("first", [b"", b"noise", encode(Reply(1)), encode(Hello(Description(id="", splits={"train": 1})))])
def test_a_host_that_speaks_nonsense_is_refused(service: Service, first: bytes) -> None:
    with _raw(service) as socket:
        socket.send(first)
        answer = read_from_service(socket.recv(timeout=10))
        assert isinstance(answer, Refused) and answer.message


def test_a_hosts_answers_are_not_believed(service: Service, client: relax.Client) -> None:
    """Media that do not decode, rewards that are not finite, messages that name what never came."""
    for number, (messages, media, what) in enumerate(
        [
            ([{"role": "user", "content": "hi"}], [("image", b"not a picture")], "image"),
            (
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "relax-media:" + 64 * "0"}}]}],
                [],
                "media",
            ),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}], [], "remote"),
            ("text", [], "wrong form"),
            ([], [], "no observation"),
            ([{"role": "user", "content": "hi"}], [("program", b"x")], "program"),
        ]
    ):
        with _raw(service) as socket:
            socket.send(encode(Hello(Description(id=f"liar-{number}", splits={"train": 1}))))
            assert isinstance(read_from_service(socket.recv(timeout=10)), Welcome)
            errors: list[Exception] = []

            def play(env: str = f"liar-{number}", errors: list[Exception] = errors) -> None:
                try:
                    client.session(env, **ONE)
                except relax.ServiceError as error:
                    errors.append(error)

            thread = threading.Thread(target=play)
            thread.start()
            ask = read_from_service(socket.recv(timeout=10))
            assert isinstance(ask, Reset)
            socket.send(encode(Reply(ask.id, {"messages": messages, "info": {}}, media=media)))
            thread.join(30)
            assert errors and what in str(errors[0]), (number, errors)
