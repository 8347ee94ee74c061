"""`from_gymnasium`: environments of Gymnasium played with words and pictures."""

from __future__ import annotations

import warnings
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import relax_sdk as relax
from relax_sdk.errors import ConfigError, EnvError
from relax_sdk.gymnasium_env import GymnasiumEnv, ansi_text, from_gymnasium, observation_text
from relax_sdk.media import Image, decode_image
from relax_sdk.messages import AssistantMessage, Text
from relax_sdk.registry import get_spec
from relax_sdk.tasks import task_splits


def say(text: str) -> AssistantMessage:
    return AssistantMessage(content=(Text(text),))


class Corridor(gymnasium.Env[Any, Any]):
    """Five cells in a row; actions 10 (left) and 11 (right); the end is on the right. Drawn as a picture 20 pixels wide."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, render_mode: str | None = None, length: int = 5) -> None:
        self.render_mode, self.length = render_mode, length
        self.observation_space = gymnasium.spaces.Discrete(length)
        self.action_space = gymnasium.spaces.Discrete(2, start=10)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(self.length - 1))
        return self.place, {}

    def step(self, action: int) -> Any:
        assert action in (10, 11)
        self.place = max(0, self.place + (1 if action == 11 else -1))
        return self.place, -0.1, self.place == self.length - 1, False, {"place": self.place}

    def render(self) -> Any:
        picture = np.zeros((4, 20, 3), np.uint8)
        picture[:, 4 * self.place : 4 * self.place + 4] = 255
        return picture


@pytest.fixture(autouse=True, scope="module")
def corridor() -> Any:
    gymnasium.register("Corridor-v0", entry_point=Corridor)
    yield
    gymnasium.registry.pop("Corridor-v0")


def start(cls: type[GymnasiumEnv], seed: int = 0, **task: Any) -> tuple[GymnasiumEnv, list[Any]]:
    env = cls()
    return env, env.reset(options={"task": {"seed": seed, **task}})[0]  # type: ignore[index]


def test_a_corridor_as_text() -> None:
    env, shown = start(from_gymnasium("Corridor-v0", actions=["Left", "Right"]))
    assert shown[0] == "Actions: Left, Right\n" and shown[1] in "0123"
    place = int(shown[1])
    for word in ("right", " RIGHT\n", "1"):
        shown, reward, terminated, truncated, info = env.step(say(word))
        place += 1
        assert (reward, truncated, info) == (-0.1, False, {"place": place})
        if terminated:
            break
        assert shown == str(place)
    assert terminated == (place == 4) and (shown is None) == terminated


def test_the_picture_is_lossless() -> None:
    env, shown = start(from_gymnasium("Corridor-v0", render="image", prompt=""))
    assert env.modalities == {"image"} and isinstance(shown[0], Image)
    np.testing.assert_array_equal(decode_image(shown[0].bytes()), env._inner.render())
    (following, *_) = env.step(say("0"))
    assert isinstance(following, Image)


def test_a_group_begins_alike_and_rows_differ() -> None:
    cls = from_gymnasium("CartPole-v1")
    begin = [start(cls, seed)[1][1] for seed in (3, 3, 4)]
    assert begin[0] == begin[1] != begin[2]
    other_seed = cls().reset(seed=99, options={"task": {"seed": 3}})[0]  # type: ignore[index]
    assert other_seed[1] == begin[0], "the row's seed decides, not the episode's"


def test_train_and_eval_seeds_are_disjoint() -> None:
    splits = task_splits(from_gymnasium("Corridor-v0").tasks)
    train, held_out = splits["train"], splits["eval"]
    assert len(held_out) == 256 and len(train) == 1_000_000
    seeds = {held_out.row(i)["seed"] for i in range(256)}
    assert seeds == set(range(256)) and train.row(0)["seed"] == 256 and train.row(999_999)["seed"] == 1_000_255


@pytest.mark.parametrize("text", ["", "up", "2", "-1", "left right", "²", "９", "left!"])
def test_an_invalid_action_is_answered(text: str) -> None:
    env, shown = start(from_gymnasium("Corridor-v0", actions=["left", "right"], invalid_reward=-0.5, max_invalid=2))
    answer, reward, terminated, truncated, info = env.step(say(text))
    assert answer == "Answer one of: left, right"
    assert (reward, terminated, truncated, info) == (-0.5, False, False, {"invalid": 1})
    assert env.step(say("right"))[4] == {"place": int(shown[1]) + 1}, "the environment stood still meanwhile"
    assert env.step(say(text))[2], "the second such answer ends the episode"
    assert not env.reset(options={"task": {"seed": 0}})[1], "and the next begins anew"  # type: ignore[index]
    assert not env.step(say(text))[2]


def test_a_parser_of_ones_own() -> None:
    def last_word(text: str) -> int | None:
        return {"left": 0, "right": 1, "far": 7}.get(text.split()[-1] if text.split() else "")

    env, shown = start(from_gymnasium("Corridor-v0", parse=last_word))
    assert env.step(say("I think I go right"))[4] == {"place": int(shown[1]) + 1}
    assert env.step(say("no idea"))[4] == {"invalid": 1}
    with pytest.raises(EnvError, match=r"parse\(\) returned 7, not an action from 0 to 1"):
        env.step(say("go far"))


@pytest.mark.parametrize("id", ["CartPole-v1", "FrozenLake-v1", "Corridor-v0", "Blackjack-v1"])
def test_gymnasiums_check_passes(id: str) -> None:
    env = from_gymnasium(id)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*render mode.*")
        check_env(env)
    env.close()


def test_cartpole_as_pictures() -> None:
    pytest.importorskip("pygame")
    env, shown = start(from_gymnasium("CartPole-v1", render="image", actions=["left", "right"]))
    assert (shown[1].ref.width, shown[1].ref.height) == (600, 400)
    total, over = 0.0, False
    while not over:
        shown, reward, terminated, truncated, _ = env.step(say("left"))
        total, over = total + reward, terminated or truncated
    assert 5 <= total <= 15 and shown is None, "always to the left, the pole falls soon"
    env.close()


def test_frozen_lake_in_characters_can_be_won() -> None:
    lake = from_gymnasium(
        "FrozenLake-v1", render="ansi", actions=["left", "down", "right", "up"], is_slippery=False, map_name="4x4"
    )
    env, shown = start(lake)
    assert shown[1] == "[S]FFF\nFHFH\nFFFH\nHFFG"
    for word in ("down", "down", "right", "right", "down"):
        assert env.step(say(word))[1:3] == (0.0, False)
    shown, reward, terminated, _, _ = env.step(say("right"))
    assert (shown, reward, terminated) == (None, 1.0, True)


def test_registered_under_a_name() -> None:
    cls = from_gymnasium("Corridor-v0", name="corridor-words-v0", defaults={"steps": 5}, length=3)
    spec = get_spec("corridor-words-v0")
    assert spec.load() is cls and spec.defaults == {"steps": 5}
    assert spec.make()._inner.unwrapped.length == 3  # type: ignore[attr-defined]
    from_gymnasium("Corridor-v0", name="corridor-words-v0")  # a notebook cell, run again


def test_the_class_can_be_sent_to_another_process() -> None:
    cls = cloudpickle.loads(cloudpickle.dumps(from_gymnasium("CartPole-v1", actions=["left", "right"])))
    env, shown = start(cls)
    assert shown[0] == "Actions: left, right\n" and env.step(say("left"))[1] == 1.0


def test_format_examples_are_actions_of_every_kind() -> None:
    env = from_gymnasium("Corridor-v0", actions=["left", "right"])()
    rng = np.random.default_rng(0)
    assert {env.format_example(rng).text for _ in range(20)} == {"left", "right"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"id": "NoSuchEnv-v0"}, r"gymnasium\.make\('NoSuchEnv-v0'\) failed"),
        ({"id": "no_such_module:Env-v0"}, "No module named 'no_such_module'"),
        ({"id": "Pendulum-v1"}, "only discrete actions can be named in text"),
        ({"id": "Corridor-v0", "render": "ansi"}, r"cannot be shown as 'ansi'.*only \['rgb_array'\]"),
        ({"id": "Corridor-v0", "render": "audio"}, "render = 'audio'; allowed: text, ansi, image"),
        ({"id": "Corridor-v0", "actions": ["left"]}, "allowed: 2 different names"),
        ({"id": "Corridor-v0", "actions": ["left", "LEFT"]}, "allowed: 2 different names"),
        ({"id": "Corridor-v0", "max_invalid": 0}, "max_invalid = 0; allowed: 1 or more"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_wrapped(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        from_gymnasium(**arguments)


@pytest.mark.parametrize(
    ("observation", "text"),
    [
        (3, "3"),
        (np.int64(7), "7"),
        (0.123456, "0.123"),
        (np.array([1.0, -0.00012345]), "[1 -0.000123]"),
        (np.array([[1, 2], [3, 4]]), "[[1 2] [3 4]]"),
        ((1, np.array([True])), "1, [True]"),
        ({"a": 1, "b": "go"}, "a: 1, b: go"),
    ],
)
def test_observations_as_text(observation: Any, text: str) -> None:
    assert observation_text(observation) == text


def test_colours_of_a_terminal_are_taken_out() -> None:
    assert ansi_text("\x1b[41mS\x1b[0mF\nG\n") == "[S]F\nG"


def test_it_is_exported() -> None:
    assert relax.from_gymnasium is from_gymnasium
