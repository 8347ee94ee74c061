"""Rewards over finished trajectories: methods marked `@reward`, a `Rubric` of functions, and group rewards."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from relax_sdk.errors import ConfigError, EpisodeTimeout, RewardError
from relax_sdk.trajectory import Trajectory

F = TypeVar("F", bound=Callable[..., Any])
ONE = "f(trajectory: Trajectory) -> float"
GROUP = "f(trajectories: list[Trajectory]) -> list[float]"
_MARK = "__relax_reward__"

RewardFunction = Callable[[Trajectory], "float | Awaitable[float]"]
Invoke = Callable[..., Awaitable[Any]]
"""`await invoke(function, *arguments)` calls a plain or async function where it may block, and returns its value."""
GroupRewardFunction = Callable[[Sequence[Trajectory]], "Sequence[float] | Awaitable[Sequence[float]]"]


@overload
def reward(function: F, *, weight: float = 1.0) -> F: ...


@overload
def reward(function: None = None, *, weight: float = 1.0) -> Callable[[F], F]: ...


def reward(function: Callable[..., Any] | None = None, *, weight: float = 1.0) -> Any:
    """Mark a method of an `Env` as a reward over the finished trajectory; it may be `async def`.

    Args:
        function: takes the `Trajectory`, returns a finite number.
        weight: what it counts in the sum; 0 records it only.
    """

    def mark(f: F) -> F:
        setattr(f, _MARK, weight)
        return f

    return mark(function) if function is not None else mark


@dataclass(frozen=True)
class Rubric:
    """A weighted set of reward functions over a finished trajectory, or over its whole group.

    An environment has one as its class attribute `rubric`:

        def short(trajectory: Trajectory) -> float: ...
        def best_of(trajectories: list[Trajectory]) -> list[float]: ...

        class MyEnv(relax.Env):
            rubric = relax.Rubric([short], weights=[0.5], group_functions=[best_of])

    Raises:
        ConfigError: a number of weights other than that of functions, weights that are not finite, two functions of one name,
            or a function that does not take exactly one argument.
    """

    functions: Sequence[RewardFunction] = ()
    """Each takes a finished `Trajectory` and returns a finite number; they may be `async def`."""
    weights: Sequence[float] | None = None
    """One per function; default all 1."""
    group_functions: Sequence[GroupRewardFunction] = ()
    """Each takes the list of a group's finished trajectories and returns as many finite numbers, in the same order."""
    group_weights: Sequence[float] | None = None
    names: Sequence[str] = field(default=(), init=False)

    def __post_init__(self) -> None:
        for functions, weights in ((self.functions, self.weights), (self.group_functions, self.group_weights)):
            if weights is not None and len(weights) != len(functions):
                raise ConfigError(f"Rubric: {len(functions)} functions but {len(weights)} weights")
            if not all(math.isfinite(weight) for weight in weights or ()):
                raise ConfigError(f"Rubric: weights = {list(weights or ())}; allowed: finite numbers")
        for functions, argument in ((self.functions, ONE), (self.group_functions, GROUP)):
            for function in functions:
                _check_signature(function, argument)
        names = [_name(f) for f in (*self.functions, *self.group_functions)]
        if len(set(names)) != len(names) or "env" in names:
            raise ConfigError(f"Rubric: reward names must differ, and 'env' is the sum of the step rewards; got {names}")
        object.__setattr__(self, "names", tuple(names))


def _check_signature(function: Any, form: str) -> None:
    """Raise unless a function can be called with one argument."""
    if not callable(function):
        raise ConfigError(f"Rubric: {function!r} is not a function; a reward is {form}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            f"Rubric: {_name(function)}{signature} cannot be called with one argument; it must be {form}"
        ) from error


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def scores_groups(env: Any) -> bool:
    """Whether an environment has rewards that see a whole group."""
    rubric: Rubric | None = getattr(env, "rubric", None)
    return getattr(env, "remote_group_rewards", False) or (rubric is not None and bool(rubric.group_functions))


def reward_methods(env: Any) -> dict[str, tuple[Callable[..., Any], float]]:
    """The `@reward` methods of an environment: bound method and weight, by name."""
    found: dict[str, tuple[Callable[..., Any], float]] = {}
    for cls in reversed(type(env).__mro__):
        for name, member in vars(cls).items():
            if hasattr(member, _MARK):
                found[name] = (getattr(env, name), getattr(member, _MARK))
    return found


def reward_weights(cls: type) -> dict[str, float]:
    """The weights of the components that an environment's class adds to the rewards of its steps, by name."""
    found = {
        name: getattr(member, _MARK) for base in cls.__mro__ for name, member in vars(base).items() if hasattr(member, _MARK)
    }
    rubric = getattr(cls, "rubric", None)
    if isinstance(rubric, Rubric):
        for functions, weights in ((rubric.functions, rubric.weights), (rubric.group_functions, rubric.group_weights)):
            found |= {_name(f): float(w) for f, w in zip(functions, weights or [1.0] * len(functions), strict=True)}
    return found


async def score(env: Any, trajectory: Trajectory, invoke: Invoke | None = None) -> None:
    """Add an environment's reward components to a finished trajectory, in place.

    `rewards["env"]` is the sum of the turn rewards; `reward` becomes that plus the weighted components.

    Args:
        env: whose `@reward` methods and rubric are used.
        trajectory: finished.
        invoke: calls the functions; default: right here.

    Raises:
        RewardError: a function raised or returned something that is not a finite number.
        ConfigError: two components of one name.
    """
    trajectory.rewards["env"] = sum(turn.reward for turn in trajectory.turns)
    total = trajectory.rewards["env"]
    remote = getattr(env, "score_remotely", None)  # its code runs elsewhere
    if remote is not None:
        trajectory.reward, components = await _call("of the host", remote, trajectory, invoke)
        trajectory.rewards |= components
        return
    rubric: Rubric | None = getattr(env, "rubric", None)
    components = dict(reward_methods(env))
    if rubric is not None:
        twice = sorted(set(components) & set(rubric.names))
        if twice:
            raise ConfigError(f"{type(env).__name__}: {twice} are names both of @reward methods and of functions in its rubric")
        weights = rubric.weights or [1.0] * len(rubric.functions)
        components |= {_name(f): (f, w) for f, w in zip(rubric.functions, weights, strict=True)}
    for name, (function, weight) in components.items():
        value = await _call(name, function, trajectory, invoke)
        trajectory.rewards[name] = finite(name, value)
        total += weight * trajectory.rewards[name]
    trajectory.reward = total


async def score_group(env: Any, trajectories: Sequence[Trajectory], invoke: Invoke | None = None) -> None:
    """Add the group rewards of an environment's rubric to its trajectories, in place; `invoke` as in `score`.

    Raises:
        RewardError: a function raised, or did not return one finite number per trajectory.
    """
    remote = getattr(env, "score_group_remotely", None)
    if remote is not None:
        for trajectory, (total, components) in zip(
            trajectories, await _call("of the host", remote, trajectories, invoke), strict=True
        ):
            trajectory.reward, trajectory.rewards = total, trajectory.rewards | components
        return
    rubric: Rubric | None = getattr(env, "rubric", None)
    if rubric is None:
        return
    weights = rubric.group_weights or [1.0] * len(rubric.group_functions)
    for function, weight in zip(rubric.group_functions, weights, strict=True):
        name = _name(function)
        values = await _call(name, function, trajectories, invoke, f" (a group reward is {GROUP})")
        if not isinstance(values, Iterable):
            raise RewardError(
                f"group reward {name!r} must return one number per trajectory, got {type(values).__name__}; it must be {GROUP}"
            )
        values = list(values)
        if len(values) != len(trajectories):
            raise RewardError(f"group reward {name!r} returned {len(values)} values for {len(trajectories)} trajectories")
        for trajectory, value in zip(trajectories, values, strict=True):
            trajectory.rewards[name] = finite(name, value)
            trajectory.reward += weight * trajectory.rewards[name]


async def _call(name: str, function: Callable[..., Any], argument: Any, invoke: Invoke | None, form: str = "") -> Any:
    try:
        if invoke is not None:
            return await invoke(function, argument)
        value = function(argument)
        return await value if inspect.isawaitable(value) else value
    except (RewardError, EpisodeTimeout):
        raise
    except Exception as error:
        raise RewardError(f"reward {name!r} raised {type(error).__name__}: {error}{form}") from error


def finite(name: str, value: Any) -> float:
    """`value` as a float.

    Raises:
        RewardError: not a number, NaN or infinite.
    """
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(f"reward {name!r} must be a number, got {type(value).__name__}") from error
    if not math.isfinite(number):
        raise RewardError(f"reward {name!r} is {number}; it must be finite")
    return number
