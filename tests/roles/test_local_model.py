"""Several threads ask a trained model; its rollout process is a fake one that answers when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from relax_server.engines.addresses import EngineAddress
from relax_server.roles import local_model
from relax_server.roles.layout import RunLayout
from relax_server.roles.local import LocalRuntime
from relax_server.roles.messages import Chat, ChatDone, Evaluate, Evaluated, Failed, RolloutReady
from sample_groups import make_group

import relax_sdk as relax
from relax_sdk.config import RunConfig, SamplingParams
from relax_sdk.evaluation import Evaluation
from relax_sdk.messages import AssistantMessage, Message, Text
from relax_sdk.registry import EnvSpec
from relax_sdk.runtime import Job

LIMIT = 30.0
SHORT = SamplingParams(max_new_tokens=4)


class FakeRollout:
    """Keeps what it is asked; once there are `wait_for` questions it answers them all, the last one first."""

    def __init__(self, put: Callable[[Any], None]) -> None:
        self.put, self.wait_for, self.asked = put, 1, list[Any]()
        self.fails = False
        self.played: list[relax.Trajectory] = []
        """The episodes of an evaluation."""

    async def start(self, first: Any) -> None:
        asyncio.get_running_loop().call_soon(self.put, RolloutReady(True, False))

    async def stop(self) -> None:
        pass

    def send(self, message: Any) -> None:
        self.asked.append(message)
        if len(self.asked) >= self.wait_for:
            for question in reversed(self.asked):
                asyncio.get_running_loop().call_soon(self.put, self._answer(question))
            self.asked = []

    def _answer(self, question: Any) -> Any:
        if self.fails:
            return Failed("it fell over", fatal=True)
        if isinstance(question, Evaluate):
            return Evaluated(question.step, Evaluation(float(question.limit), 0.0, question.limit, {}, {}, self.played), 0, 0)
        assert isinstance(question, Chat)
        return ChatDone(question.id, AssistantMessage(content=(Text(f"to {question.messages[0].text}"),)), None)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[Any, FakeRollout]]:
    """The model, and the fake process behind it."""
    made: list[FakeRollout] = []

    class Placement:
        def role(self, name: str, folder: Path, on_message: Callable[[Any], None], threads: int = 1) -> FakeRollout:
            made.append(FakeRollout(on_message))
            return made[-1]

    async def engine(*_: Any, **__: Any) -> Any:
        async def stop() -> None: ...

        return SimpleNamespace(reach=EngineAddress("http://fake", "embedded"), stop=stop)

    monkeypatch.setattr(local_model, "LocalPlacement", Placement)
    monkeypatch.setattr(local_model, "start_engine", engine)
    monkeypatch.setattr(local_model, "resolve_model", lambda name, seed=0, media=None: tmp_path)
    RunLayout(tmp_path).weights.mkdir(parents=True)
    model = LocalRuntime().open_model(Job(EnvSpec("x-v0", relax.Env), RunConfig("x-v0"), tmp_path), lambda text: None)
    yield model, made[0]
    model.close()


def ask(model: Any, word: str) -> str:
    return model.generate([Message("user", (Text(word),))], SHORT).text


def test_two_threads_get_the_answers_to_their_own_questions(fake: tuple[Any, FakeRollout]) -> None:
    model, rollout = fake
    rollout.wait_for = 2
    with ThreadPoolExecutor(2) as threads:
        asked = {word: threads.submit(ask, model, word) for word in ("one", "two")}
        assert {word: answer.result(LIMIT) for word, answer in asked.items()} == {"one": "to one", "two": "to two"}


def test_an_evaluation_and_a_question_at_once(fake: tuple[Any, FakeRollout]) -> None:
    model, rollout = fake
    rollout.wait_for = 2
    with ThreadPoolExecutor(2) as threads:
        played = threads.submit(model.evaluate, "eval", 7, lambda text: None)
        answer = threads.submit(ask, model, "one")
        assert (played.result(LIMIT).n, answer.result(LIMIT)) == (7, "to one")


def test_the_episodes_of_an_evaluation_can_be_looked_at(fake: tuple[Any, FakeRollout], tmp_path: Path) -> None:
    model, rollout = fake
    rollout.played = make_group("eval/4/0", versions=(4, 4)).trajectories
    found = model.evaluate("eval", 2, lambda text: None).trajectories
    assert isinstance(found, relax.Trajectories) and [t.id for t in found] == ["eval/4/0-0", "eval/4/0-1"]
    assert {(t.split, t.media_folder) for t in found} == {("eval", str(tmp_path / "media"))}


def test_two_evaluations_follow_one_another(fake: tuple[Any, FakeRollout]) -> None:
    model, _ = fake
    with ThreadPoolExecutor(2) as threads:
        played = [threads.submit(model.evaluate, "eval", n, lambda text: None) for n in (3, 5)]
        assert [evaluation.result(LIMIT).n for evaluation in played] == [3, 5]


def test_a_process_that_fails_fails_every_question(fake: tuple[Any, FakeRollout]) -> None:
    model, rollout = fake
    rollout.wait_for, rollout.fails = 2, True
    with ThreadPoolExecutor(2) as threads:
        for answer in [threads.submit(ask, model, word) for word in ("one", "two")]:
            with pytest.raises(relax.RunError, match="the rollout process failed: it fell over"):
                answer.result(LIMIT)
    with pytest.raises(relax.RunError, match="it fell over"):
        ask(model, "three")
