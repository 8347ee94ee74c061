"""`Judge`: questions, answers, retries and nonsense, against a fake chat endpoint."""

from __future__ import annotations

import asyncio
import gc
import pickle
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, ClassVar

import gymnasium
import httpx
import pytest

import relax_sdk as relax
from relax_sdk.errors import ConfigError, RewardError
from relax_sdk.judge import Judge, _client, parse_score, transcript
from relax_sdk.retrying import retrying
from relax_sdk.rewards import Rubric, score
from relax_sdk.sync_env import SyncEnv
from relax_sdk.trajectory import Status, Trajectory, Turn

from .fake_judge import fake_judge


@pytest.fixture
def episode() -> Trajectory:
    messages: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "relax-media:00"}}, {"type": "text", "text": "{x}?"}],
        },
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "guess", "arguments": '{"number": 3}'}}]},
        {"role": "tool", "content": "higher", "tool_call_id": "1"},
    ]
    turns = [Turn([1], [2], [-1.0], reward=0.5)]
    return Trajectory("t", "env", "0", 0, "g", 0, 1, 0, Status.COMPLETED, turns=turns, messages=messages)


def judge(url: str, **fields: Any) -> Judge:
    return Judge(url, "judge-model", **{"backoff": 0.0, "timeout": 5.0} | fields)


async def test_the_question_and_the_score(episode: Trajectory) -> None:
    async with fake_judge("7") as fake:
        asked = judge(fake.url, scale=(1, 9), api_key="secret", system="Be strict.", extra_body={"top_k": 1})
        assert await asked(episode) == pytest.approx(0.75)
    (request,) = fake.requests
    assert request["model"] == "judge-model" and request["temperature"] == 0.0 and request["top_k"] == 1
    assert request["messages"][0] == {"role": "system", "content": "Be strict."}
    question = request["messages"][1]["content"]
    assert 'user: [image]{x}?\n\nassistant: [calls guess({"number": 3})]\n\ntool: higher' in question
    assert "one number from 1 (worst) to 9 (best)" in question
    assert fake.headers[0]["Authorization"] == "Bearer secret" and "secret" not in repr(asked)


async def test_a_question_of_ones_own(episode: Trajectory) -> None:
    async with fake_judge("Score: 10") as fake:
        assert await judge(fake.url, prompt='JSON like {"a": 1}, {low}-{high}')(episode) == 1.0
        assert await judge(fake.url, prompt=lambda t: f"{t.env} was played")(episode) == 1.0
    assert [r["messages"][0]["content"] for r in fake.requests] == ['JSON like {"a": 1}, 0-10', "env was played"]
    assert "Authorization" not in fake.headers[0]


async def test_a_parser_of_ones_own(episode: Trajectory) -> None:
    async with fake_judge("good") as fake:
        assert await judge(fake.url, parse=lambda text: {"good": 10.0, "bad": 0.0}[text])(episode) == 1.0


@pytest.mark.parametrize("status", [429, 500, 503, 408])
async def test_a_passing_error_is_tried_again(episode: Trajectory, status: int) -> None:
    async with fake_judge(status, status, "5") as fake:
        assert await judge(fake.url, attempts=3)(episode) == 0.5
    assert len(fake.requests) == 3 and fake.requests[0] == fake.requests[2]


async def test_questions_share_a_connection(episode: Trajectory) -> None:
    async with fake_judge(503, "5") as fake:
        assert await judge(fake.url)(episode) == 0.5
        assert await judge(fake.url, name="another")(episode) == 0.5
    assert len(fake.requests) == 3 and len(set(fake.peers)) == 1


def test_event_loops_have_connections_of_their_own(episode: Trajectory) -> None:
    async def ask() -> float:
        async with fake_judge("5") as fake:
            return await judge(fake.url)(episode)

    assert [asyncio.run(ask()) for _ in range(2)] == [0.5, 0.5]


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The address of a judge that goes on answering when the event loop of a test has ended."""
    started: Future[str] = Future()
    stop: Future[asyncio.Event] = Future()

    async def serve() -> None:
        async with fake_judge("5") as fake:
            ended = asyncio.Event()
            stop.set_result(ended)
            loops.append(asyncio.get_running_loop())
            started.set_result(fake.url)
            await ended.wait()

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    yield started.result(10)
    loops[0].call_soon_threadsafe(stop.result().set)
    thread.join(10)


def test_connections_are_closed_with_their_event_loop(episode: Trajectory, elsewhere: str) -> None:
    clients: list[httpx.AsyncClient] = []

    async def ask() -> None:
        assert await judge(elsewhere)(episode) == 0.5
        clients.append(await _client())

    gc.collect()  # what earlier tests have left warns before, not within
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(ask())
        closed = clients.pop().is_closed
        gc.collect()
    assert closed and [str(w.message) for w in caught if issubclass(w.category, ResourceWarning)] == []


class Judged(gymnasium.Env[Any, Any]):
    """Asks a judge within `step`."""

    clients: ClassVar[list[httpx.AsyncClient]] = []

    def __init__(self, url: str, episode: Trajectory) -> None:
        self.url, self.episode = url, episode

    async def step(self, action: Any) -> Any:
        reward = await judge(self.url)(self.episode)
        self.clients.append(await _client())
        return None, reward, True, False, {}


def test_connections_are_closed_with_an_environment_of_plain_gymnasium(episode: Trajectory, elsewhere: str) -> None:
    env = SyncEnv(Judged(elsewhere, episode))
    assert env.step(relax.AssistantMessage())[1] == 0.5
    env.close()
    (client,) = Judged.clients
    assert client.is_closed


async def test_a_server_that_asks_to_wait_is_waited_for(episode: Trajectory, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("relax_sdk.judge.retrying", lambda *args, **more: retrying(*args, **more).copy(sleep=sleep))
    async with fake_judge((429, 7), (429, 600), 503, "5") as fake:
        assert await judge(fake.url, backoff=0.5, attempts=4)(episode) == 0.5
    assert waited[:2] == [7.0, 60.0] and 1.0 <= waited[2] <= 2.0


async def test_attempts_come_to_an_end(episode: Trajectory) -> None:
    async with fake_judge(503) as fake:
        with pytest.raises(RewardError, match=r"judge: no answer from http.* in 2 attempts; last: HTTP 503: status 503"):
            await judge(fake.url, attempts=2)(episode)
    assert len(fake.requests) == 2


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_a_refusal_is_final(episode: Trajectory, status: int) -> None:
    async with fake_judge(status, "5") as fake:
        with pytest.raises(RewardError, match=f"refused: HTTP {status}"):
            await judge(fake.url)(episode)
    assert len(fake.requests) == 1


async def test_a_judge_that_hangs(episode: Trajectory) -> None:
    async with fake_judge("hang", "5") as fake:
        assert await judge(fake.url, timeout=0.2)(episode) == 0.5
        with pytest.raises(RewardError, match=r"in 1 attempts; last: .*Timeout"):
            fake.script = ["hang"]
            await judge(fake.url, timeout=0.2, attempts=1)(episode)


async def test_a_judge_that_is_not_there(episode: Trajectory) -> None:
    async with fake_judge("5") as fake:
        pass
    with pytest.raises(RewardError, match=r"in 2 attempts; last: ConnectError"):
        await judge(fake.url, attempts=2)(episode)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("I cannot say.", "'I cannot say.': it holds no number"),
        ("Between 3 and 7", "it holds 2 numbers"),
        ("11", "answered 11, not from 0 to 10"),
        ("-1", "answered -1, not from 0 to 10"),
        ("   ", "answered nothing"),
        ({"choices": []}, "answered no chat completion"),
        ({"error": "overloaded"}, "answered no chat completion"),
        ({"choices": [{"message": {"content": None}}]}, "answered nothing"),
        ([], "answered no chat completion"),
    ],
    ids=str,
)
async def test_nonsense_is_an_error_and_never_a_guess(episode: Trajectory, answer: Any, why: str) -> None:
    async with fake_judge(answer) as fake:
        with pytest.raises(RewardError, match=why):
            await judge(fake.url)(episode)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("7", 7),
        (" 7.5\n", 7.5),
        ("7/10", 7),
        ("7 / 10.", 7),
        ("Score: 8", 8),
        ("There are 3 faults and 2 merits.\n**Score:** 6", 6),
        ("score = 4, no, score = 5", 5),
        ("I give it a 9.", 9),
        ("Rating: -2", -2),
        ("GPT4 says 3", 3),
    ],
)
def test_numbers_in_words(answer: str, number: float) -> None:
    assert parse_score(answer) == number


@pytest.mark.parametrize("answer", ["", "seven", "3 or 4", "v1.2.3", "nan", "inf"])
def test_words_without_a_clear_number(answer: str) -> None:
    with pytest.raises(ValueError, match="it holds"):
        parse_score(answer)


async def test_judges_in_a_rubric(episode: Trajectory) -> None:
    async with fake_judge("5") as fake:

        class Judged(relax.Env):
            rubric = Rubric([judge(fake.url, name="polite"), judge(fake.url, name="right")], weights=[1.0, 2.0])

        await score(Judged(), episode)
    assert episode.rewards == {"env": 0.5, "polite": 0.5, "right": 0.5} and episode.reward == 0.5 + 0.5 + 1.0
    with pytest.raises(ConfigError, match="names must differ"):
        Rubric([judge(fake.url), judge(fake.url)])


def test_a_judge_can_be_sent_to_another_process() -> None:
    one = judge("http://localhost:1/v1")
    assert pickle.loads(pickle.dumps(one)) == one


def test_an_empty_transcript() -> None:
    assert transcript(Trajectory("t", "env", "0", 0, "g", 0, 1, 0, Status.COMPLETED)) == ""


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"base_url": "localhost:8000"}, r"Judge\.base_url = 'localhost:8000'; allowed: an http"),
        ({"scale": (5, 5)}, r"Judge\.scale = \(5, 5\); allowed: \(worst, best\)"),
        ({"timeout": 0}, r"Judge\.timeout = 0; allowed: above 0"),
        ({"attempts": 0}, r"Judge\.attempts = 0; allowed: 1 or more"),
        ({"backoff": -1}, r"Judge\.backoff = -1"),
        ({"name": ""}, r"Judge\.name = ''"),
    ],
)
def test_a_judge_that_cannot_be(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Judge(**{"base_url": "http://localhost/v1", "model": "m"} | fields)
