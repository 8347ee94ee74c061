"""`from_gymnasium`: any Gymnasium environment with discrete actions as an `Env`, its observations as text or pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np

from relax_sdk.env import Env, ResetResult, StepResult
from relax_sdk.errors import ConfigError, EnvError
from relax_sdk.media import Image
from relax_sdk.messages import AssistantMessage, Text

Render = Literal["text", "ansi", "image"]
RENDER_MODES: dict[str, str | None] = {"text": None, "ansi": "ansi", "image": "rgb_array"}
"""Gymnasium's `render_mode` for each."""

EVAL_SEEDS = 256
TRAIN_SEEDS = 1_000_000


@dataclass(frozen=True)
class SeedRows(Sequence[dict[str, int]]):
    """Task rows `{"seed": first}`, `{"seed": first + 1}`, …"""

    first: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.length))]
        if not -self.length <= index < self.length:
            raise IndexError(f"row {index} of {self.length}")
        return {"seed": self.first + int(index) % self.length}


def seed_tasks() -> dict[str, SeedRows]:
    """Seeds as tasks: 256 for `eval`, a million others for `train`."""
    return {"train": SeedRows(EVAL_SEEDS, TRAIN_SEEDS), "eval": SeedRows(0, EVAL_SEEDS)}


class GymnasiumEnv(Env):
    """A Gymnasium environment with discrete actions; `from_gymnasium` makes subclasses of it.

    The row's `seed` seeds the wrapped environment, so that all episodes of a group begin alike. Its observation is shown as
    text or picture, and the text of the action names what to do: one of `actions` (in any case) or its number. Anything else
    is answered with the list of actions and `invalid_reward` while the wrapped environment stands still; after `max_invalid`
    such answers in an episode the episode ends.
    """

    gymnasium_id: ClassVar[str]
    make_kwargs: ClassVar[dict[str, Any]]
    shown_as: ClassVar[Render]
    prompt: ClassVar[str]
    actions: ClassVar[tuple[str, ...]]
    invalid_reward: ClassVar[float] = 0.0
    max_invalid: ClassVar[int] = 3
    parse: ClassVar[Callable[[str], int | None] | None] = None
    tasks = staticmethod(seed_tasks)

    def __init__(self) -> None:
        self._inner = _make(self.gymnasium_id, self.shown_as, self.make_kwargs)
        self._invalid = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Begin an episode with the row's `seed`, and show the first observation after the prompt."""
        super().reset(seed=seed)
        task = (options or {}).get("task") or {}
        observation, info = self._inner.reset(seed=task.get("seed", seed), options=task.get("options"))
        self._invalid = 0
        return [*([self.prompt + "\n"] if self.prompt else []), self._show(observation)], dict(info)

    def step(self, action: AssistantMessage) -> StepResult:
        """Do what the action's text names; a text that names no action leaves the wrapped environment as it is."""
        number = self._number(action)
        if number is None:
            self._invalid += 1
            over = self._invalid >= self.max_invalid
            return f"Answer one of: {', '.join(self.actions)}", self.invalid_reward, over, False, {"invalid": self._invalid}
        start = int(self._inner.action_space.start)  # type: ignore[attr-defined]
        observation, reward, terminated, truncated, info = self._inner.step(start + number)
        shown = None if terminated or truncated else self._show(observation)
        return shown, float(reward), bool(terminated), bool(truncated), dict(info)

    def close(self) -> None:
        """Close the wrapped environment."""
        self._inner.close()

    def format_example(self, rng: np.random.Generator) -> AssistantMessage:
        """The name of an action drawn at random."""
        return AssistantMessage(content=(Text(self.actions[int(rng.integers(len(self.actions)))]),))

    def _number(self, action: AssistantMessage) -> int | None:
        if type(self).parse is not None:
            number = type(self).parse(action.text)  # type: ignore[misc]
            if number is not None and not 0 <= number < len(self.actions):
                raise EnvError(
                    f"{self.gymnasium_id}: parse() returned {number}, not an action from 0 to {len(self.actions) - 1}"
                )
            return number
        if action.control_tokens:
            return None
        word = action.text.strip().casefold()
        names = [name.casefold() for name in self.actions]
        if word in names:
            return names.index(word)
        return int(word) if word.isascii() and word.isdecimal() and int(word) < len(names) else None

    def _show(self, observation: Any) -> str | Image:
        if self.shown_as == "text":
            return observation_text(observation)
        drawn: Any = self._inner.render()
        if self.shown_as == "image":
            return Image.from_array(np.ascontiguousarray(drawn, dtype=np.uint8))
        return ansi_text(drawn)


def from_gymnasium(
    id: str,
    *,
    render: Render = "text",
    prompt: str | None = None,
    actions: Sequence[str] | None = None,
    invalid_reward: float = 0.0,
    max_invalid: int = 3,
    parse: Callable[[str], int | None] | None = None,
    name: str | None = None,
    defaults: dict[str, Any] | None = None,
    **kwargs: Any,
) -> type[GymnasiumEnv]:
    """Make an `Env` class of any Gymnasium environment with discrete actions.

    Args:
        id: as for `gymnasium.make`.
        render: how an observation is shown: `text` (its numbers), `ansi` (the environment's own drawing in characters) or
            `image` (the environment's picture, lossless).
        prompt: put before the first observation; default: the list of actions. `""` for none.
        actions: what to call the actions, in their order; default their numbers.
        invalid_reward: the reward of an answer that names no action, usually 0 or negative.
        max_invalid: this many such answers end the episode.
        parse: reads the number of an action (0-based) out of the policy's text, or None where there is none, in place of the
            exact comparison with `actions`.
        name: register the class under this name.
        defaults: settings of `Trainer` that suit it, when it is registered.
        **kwargs: given to `gymnasium.make`.

    Raises:
        ConfigError: unknown id, actions that are not discrete, a render mode it does not have, or a wrong number of names.
    """
    if render not in RENDER_MODES:
        raise ConfigError(f"from_gymnasium: render = {render!r}; allowed: text, ansi, image")
    if max_invalid < 1:
        raise ConfigError(f"from_gymnasium: max_invalid = {max_invalid!r}; allowed: 1 or more")
    trial = _make(id, render, kwargs)
    space = trial.action_space
    trial.close()
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ConfigError(f"{id}: its actions are {space}; only discrete actions can be named in text")
    names = tuple(actions) if actions is not None else tuple(str(i) for i in range(int(space.n)))
    if len(names) != space.n or len({n.casefold() for n in names}) != len(names):
        raise ConfigError(f"{id}: actions = {list(names)}; allowed: {int(space.n)} different names")
    members: dict[str, Any] = {
        "__doc__": f"Gymnasium's {id}, shown as {render}.",
        "__module__": __name__,
        "gymnasium_id": id,
        "make_kwargs": dict(kwargs),
        "shown_as": render,
        "prompt": f"Actions: {', '.join(names)}" if prompt is None else prompt,
        "actions": names,
        "invalid_reward": float(invalid_reward),
        "max_invalid": max_invalid,
        "parse": None if parse is None else staticmethod(parse),
        "modalities": {"image"} if render == "image" else set(),
        "version": id,
    }
    cls = type(f"Gymnasium[{id}]", (GymnasiumEnv,), members)
    if name is not None:
        from relax_sdk.registry import register

        register(name, cls, tasks=seed_tasks, defaults=defaults)
    return cls


def observation_text(observation: Any) -> str:
    """An observation as short text: numbers to three significant digits, arrays in brackets, dictionaries as `name: value`."""
    if isinstance(observation, dict):
        return ", ".join(f"{key}: {observation_text(value)}" for key, value in observation.items())
    if isinstance(observation, tuple):
        return ", ".join(observation_text(value) for value in observation)
    if isinstance(observation, str):
        return observation
    array = np.asarray(observation)
    if array.ndim == 0:
        return f"{array.item():.3g}" if np.issubdtype(array.dtype, np.floating) else str(array.item())
    return "[" + " ".join(observation_text(value) for value in array) + "]"


def ansi_text(drawn: Any) -> str:
    """A drawing in characters without its terminal colours; what was highlighted stands in square brackets."""
    text = re.sub(r"\x1b\[[1-9][0-9;]*m(.*?)\x1b\[0?m", r"[\1]", str(drawn), flags=re.DOTALL)
    return re.sub(r"\x1b\[[0-9;]*m", "", text).strip("\n")


def _make(id: str, render: Render, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    mode = RENDER_MODES[render]
    try:
        env = gymnasium.make(id, **({} if mode is None else {"render_mode": mode}), **kwargs)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(f"gymnasium.make({id!r}) failed: {error}") from error
    modes = env.metadata.get("render_modes") or []
    if mode is not None and mode not in modes:
        env.close()
        raise ConfigError(f"{id} cannot be shown as {render!r}: it has no render mode {mode!r}, only {modes}")
    return env
