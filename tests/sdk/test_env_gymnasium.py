"""`Env` as a Gymnasium environment: spaces, `check_env`, `gymnasium.make`, coroutines and tools behind it."""

from __future__ import annotations

import asyncio
import pickle
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import relax_sdk as relax
from relax_sdk.env import MessageSpace
from relax_sdk.messages import AssistantMessage, Message, Text, ToolCall, as_messages
from relax_sdk.registry import list_envs
from relax_sdk.sync_env import SyncEnv
from relax_sdk.tasks import task_splits

SHIPPED = [spec.id for spec in list_envs()]


def say(text: str) -> AssistantMessage:
    return AssistantMessage(content=(Text(text),))


class Parrot(relax.Env):
    """Repeat a random word for two turns."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.turn, self.word = 0, str(self.np_random.integers(1000))
        return self.word, {"word": self.word}

    def step(self, action: AssistantMessage) -> Any:
        self.turn += 1
        return f"turn {self.turn}", float(action.text == self.word), self.turn == 2, False, {}


class SlowParrot(Parrot):
    """The same with coroutines that need the loop they began in, and a tool."""

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        self.queue: asyncio.Queue[str] = asyncio.Queue()
        return super().reset(seed=seed)

    async def step(self, action: AssistantMessage) -> Any:  # type: ignore[override]
        getter = asyncio.ensure_future(self.queue.get())
        await self.queue.put(action.text)
        return super().step(say(await getter))

    @relax.tool
    async def peek(self) -> relax.ToolResult:
        """See the word."""
        await asyncio.sleep(0)
        return relax.ToolResult(self.word, reward=-0.25)


def test_a_simple_environment_passes_gymnasiums_check() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*render mode.*")
        check_env(Parrot())


@pytest.mark.parametrize("id", SHIPPED)
def test_every_shipped_environment_passes_gymnasiums_check(id: str) -> None:
    env = gymnasium.make(f"relax/{id}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    env.close()


@pytest.mark.parametrize("id", SHIPPED)
def test_gymnasium_make_plays_a_row(id: str) -> None:
    spec = relax.get_spec(id)
    row = task_splits(spec.load_tasks())["eval"].row(3)
    env, direct = gymnasium.make(f"relax/{id}"), spec.make()
    shown, info = env.reset(seed=1, options={"task": row})
    assert shown == direct.reset(seed=1, options={"task": row})[0]  # type: ignore[index]
    assert isinstance(info, dict) and env.observation_space.contains(shown)
    rng = np.random.default_rng(0)
    for _ in range(3):
        action = env.unwrapped.format_example(rng)  # type: ignore[attr-defined]
        assert env.action_space.contains(action)
        shown, reward, terminated, truncated, info = env.step(action)
        assert isinstance(reward, float) and 0.0 <= reward <= 1.0 and not truncated
        as_messages(shown)
        if terminated:
            break
    assert terminated
    env.close()


@pytest.mark.parametrize("cls", [Parrot, SlowParrot])
def test_coroutines_are_run_to_their_end(cls: type[relax.Env]) -> None:
    env = SyncEnv(cls())
    word, info = env.reset(seed=5)
    assert info == {"word": word} and SyncEnv(Parrot()).reset(seed=5)[0] == word, "seeds give the same episode"
    assert env.step(say(word)) == ("turn 1", 1.0, False, False, {})
    assert env.step(say("else")) == ("turn 2", 0.0, True, False, {})
    env.close()


async def test_it_works_where_a_loop_is_already_running() -> None:
    """A notebook has such a loop."""
    env = SyncEnv(SlowParrot())
    word, _ = env.reset(seed=1)
    assert env.step(say(word))[1] == 1.0
    env.close()


def test_tool_calls_are_answered_by_step() -> None:
    env = SyncEnv(SlowParrot())
    word, _ = env.reset(seed=1)
    shown, reward, terminated, truncated, _ = env.step(AssistantMessage(tool_calls=(ToolCall("c", "peek", {}),)))
    assert shown == [Message("tool", (Text(word),), tool_call_id="c")]
    assert (reward, terminated, truncated) == (-0.25, False, False)
    env.close()


def test_an_environments_own_error_passes_through() -> None:
    class Broken(relax.Env):
        async def reset(self, **kwargs: Any) -> Any:  # type: ignore[override]
            raise KeyError("no map")

    env = SyncEnv(Broken())
    with pytest.raises(KeyError, match="no map"):
        env.reset()
    env.close()
    env.close()


def test_gymnasiums_wrappers_work() -> None:
    env = gymnasium.wrappers.TimeLimit(Parrot(), max_episode_steps=1)
    env.reset(seed=0)
    assert env.step(say("x"))[2:4] == (False, True)
    counted = gymnasium.wrappers.RecordEpisodeStatistics(Parrot())
    word, _ = counted.reset(seed=0)
    counted.step(say(word))
    assert counted.step(say(word))[4]["episode"]["r"] == 2.0


def test_step_without_a_definition_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"Env must define step\(action\)"):
        relax.Env().step(say("x"))


@pytest.mark.parametrize(
    ("value", "inside"),
    [
        ("text", True),
        (None, True),
        ([], True),
        (say("x"), True),
        ({"role": "user", "content": "x"}, True),
        ({"role": "robot"}, False),
        (3, False),
        ([3], False),
    ],
    ids=repr,
)
def test_the_message_space(value: Any, inside: bool) -> None:
    assert MessageSpace("user").contains(value) is inside
    assert (value in MessageSpace("user")) is inside


def test_actions_are_assistant_messages() -> None:
    space = MessageSpace("assistant")
    assert space.contains(say("x"))
    assert not space.contains("x") and not space.contains(Message("user", (Text("x"),))) and not space.contains([say("x")])


def test_spaces_sample_by_seed_and_can_be_stored() -> None:
    for role in ("user", "assistant"):
        one, other = MessageSpace(role), MessageSpace(role)
        for space in (one, other):
            space.seed(3)
        first = [one.sample() for _ in range(5)]
        assert first == [other.sample() for _ in range(5)] and all(one.contains(s) for s in first)
        assert len({repr(s) for s in first}) > 1
        assert pickle.loads(pickle.dumps(one)) == one and hash(one) == hash(other)
    assert MessageSpace("user") != MessageSpace("assistant")
