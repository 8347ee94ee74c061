"""`Env`: a Gymnasium environment whose observations and actions are chat messages."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, ClassVar

import gymnasium
import numpy as np

from relax_sdk.messages import AssistantMessage, Text
from relax_sdk.rewards import Rubric

StepResult = tuple[Any, float, bool, bool, dict[str, Any]]
ResetResult = tuple[Any, dict[str, Any]]


class MessageSpace(gymnasium.Space[Any]):
    """Everything that `as_messages` accepts; for the role `assistant`, which is that of actions, one `AssistantMessage`."""

    def __init__(self, role: str = "user") -> None:
        super().__init__(shape=None, dtype=None)
        self.role = role

    def contains(self, x: Any) -> bool:
        from relax_sdk.errors import RelaxError
        from relax_sdk.messages import as_messages

        if self.role == "assistant":
            return isinstance(x, AssistantMessage)
        try:
            as_messages(x)
        except RelaxError:
            return False
        return True

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        letter = chr(ord("A") + int(self.np_random.integers(26)))
        return AssistantMessage(content=(Text(letter),)) if self.role == "assistant" else letter

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessageSpace) and other.role == self.role

    def __hash__(self) -> int:
        return hash((MessageSpace, self.role))

    def __repr__(self) -> str:
        return f"MessageSpace({self.role!r})"


class Env(gymnasium.Env[Any, AssistantMessage]):
    """A multi-turn task: it shows observations, the policy answers with messages, and rewards say how well.

    Subclass it and write `reset` and `step`; either may be `async def`.

    - `reset(*, seed, options)` begins an episode. Call `super().reset(seed=seed)` first; then `self.np_random` is seeded.
      `options["task"]` is one row of the dataset. It returns an observation and an info dictionary.
    - `step(action)` takes an `AssistantMessage` and returns `(observation, reward, terminated, truncated, info)`. The reward
      is a finite number. `terminated`: the task is over; `truncated`: it was cut short.
    - An observation is a string, a part (`Text`, `Image`, `Audio`, `Video`), a list of these, or messages.
    - `@tool` methods become tools; the built-in loop calls them and `step` sees only actions without tool calls.
    - `@reward` methods and `rubric` score the finished trajectory.

    One instance plays one episode at a time; many instances run in one process, so long work belongs in `async def`
    methods or is fine as plain code, which runs in a thread.
    """

    modalities: ClassVar[set[str]] = set()
    """Media kinds that observations hold: `image`, `audio`, `video`. A model that lacks one is refused at the start."""
    system_prompt: ClassVar[str | None] = None
    """Put before the first observation."""
    rubric: ClassVar[Rubric | None] = None
    blocking: ClassVar[bool] = True
    """Plain (not `async`) methods, and the reward functions of `rubric`, may take long and are called in a thread. False: all
    are quick, none waits, so they are called in the event loop itself, which saves 10 to 100 µs a call."""
    version: ClassVar[str] = "0"
    """Recorded with every trajectory."""

    observation_space: gymnasium.Space[Any] = MessageSpace("user")
    action_space: gymnasium.Space[Any] = MessageSpace("assistant")

    def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> ResetResult | Awaitable[ResetResult]:
        """Begin an episode and return its first observation.

        It is called once before the first `step`, and again for every further episode of the instance. An implementation calls
        `super().reset(seed=seed)` first, which seeds `self.np_random`, and may be `async def`. A plain one is called in a
        thread, unless `blocking` is False. It may take `rollout.reset_timeout` seconds.

        Args:
            seed: for all that is random in the episode. It is the same for all episodes of a group and each attempt of one,
                so that only the policy's answers differ. None: no seed is set.
            options: `options["task"]` is one row of the tasks, a dictionary; without tasks it is `{"index": i}`. None when
                Gymnasium's own code calls it without options.

        Returns:
            The observation and an info dictionary. An observation is a string, a part (`Text`, `Image`, `Audio`, `Video`), a
            list of strings and parts, or chat messages. It must show something: None is refused here. `system_prompt` is put
            before it. What in `info` is plain data is recorded in the trajectory.

        Raises:
            EnvError: raised for the environment if it raises, or returns anything else. The episode has then failed, and
                `rollout.on_failure` says what becomes of it.
            MediaError: a part is damaged or too large.
        """
        super().reset(seed=seed)
        return None, {}

    def step(self, action: AssistantMessage) -> StepResult | Awaitable[StepResult]:  # type: ignore[override]
        """Take the policy's answer to the last observation.

        It is called after `reset`, and then after each `step` that ended nothing; never after one that did. Answers with tool
        calls go to the tools in its place, unless the agent calls `step` itself. It may be `async def`; a plain one is called
        in a thread, unless `blocking` is False. It may take `rollout.step_timeout` seconds.

        Args:
            action: the policy's message: `action.text`, `action.tool_calls`, `action.control_tokens` (what it wrote that is no
                text), and `action.finish_reason`, which is `stop`, or `length` where the token limit cut it. The text may be
                empty or nonsense; a wrong answer is no error, but gets a low reward.

        Returns:
            Gymnasium's five values, `(observation, reward, terminated, truncated, info)`. The observation is as in `reset`, or
            None where there is nothing new to show, as in a last step. The reward is a finite number of any size, for this
            turn alone; an episode's reward is their sum and the weighted components of `@reward` methods and `rubric`.
            `terminated` (bool) says that the task is over, and `truncated` (bool) that it was cut short; after either one the
            episode is scored. An episode that passes `rollout.max_turns` or `rollout.max_tokens` is truncated from outside.
            `info` is as in `reset`; the last one is kept.

        Raises:
            EnvError: raised for the environment if it raises, or returns anything else, such as four values or a reward that
                is NaN.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step(action)")

    def format_example(self, rng: np.random.Generator) -> AssistantMessage | str:
        """An action in the right *form* with contents drawn at random, for the optional warm-up.

        It is asked for after `reset`, at each turn in place of a model, and must say nothing about any answer. An environment
        that does not define it has no warm-up.

        Returns:
            The action, as a message or its text.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no format_example(rng)")
