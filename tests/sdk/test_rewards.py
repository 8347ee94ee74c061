"""Rewards: components by name, weights, groups, and what is not a reward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import relax_sdk as relax
from relax_sdk.errors import ConfigError, RewardError
from relax_sdk.rewards import Rubric, finite, reward_methods, score, score_group
from relax_sdk.trajectory import Status, Trajectory, Turn


def played(*rewards: float, index: int = 0) -> Trajectory:
    """A finished trajectory with one turn a reward."""
    turns = [Turn([1], [2], [-0.5], reward=r) for r in rewards]
    return Trajectory("t", "env", "0", 0, "g", index, 1, 0, Status.COMPLETED, turns=turns)


def length(trajectory: Trajectory) -> float:
    return trajectory.n_response_tokens


async def patience(trajectory: Trajectory) -> float:
    return len(trajectory.turns) / 10


def rank(group: Sequence[Trajectory]) -> list[float]:
    return [float(i) for i in range(len(group))]


async def mean(group: Sequence[Trajectory]) -> list[float]:
    return [sum(t.rewards["env"] for t in group) / len(group)] * len(group)


def env(trajectory: Trajectory) -> float:
    return 0.0


class Judged(relax.Env):
    rubric = Rubric([length, patience], weights=[0.5, 2.0], group_functions=[rank, mean], group_weights=[10.0, 0.0])

    @relax.reward(weight=0.0)
    def recorded_only(self, trajectory: Trajectory) -> float:
        return 7

    @relax.reward
    async def bonus(self, trajectory: Trajectory) -> bool:
        return True


async def test_every_component_is_recorded_and_weighted() -> None:
    trajectory = played(1.0, -0.5)
    await score(Judged(), trajectory)
    assert trajectory.rewards == {"env": 0.5, "recorded_only": 7.0, "bonus": 1.0, "length": 2.0, "patience": 0.2}
    assert trajectory.reward == pytest.approx(0.5 + 0 * 7 + 1 + 0.5 * 2 + 2 * 0.2)
    assert all(type(value) is float for value in trajectory.rewards.values())


async def test_scoring_again_changes_nothing() -> None:
    trajectory, env = played(1.0), Judged()
    await score(env, trajectory)
    await score_group(env, [trajectory])
    before = dict(trajectory.rewards), trajectory.reward
    await score(env, trajectory)
    await score_group(env, [trajectory])
    assert (trajectory.rewards, trajectory.reward) == before


async def test_group_rewards_see_the_whole_group() -> None:
    group, env = [played(1.0, index=0), played(0.0, index=1)], Judged()
    for trajectory in group:
        await score(env, trajectory)
    alone = [t.reward for t in group]
    await score_group(env, group)
    assert [t.rewards["rank"] for t in group] == [0.0, 1.0] and [t.rewards["mean"] for t in group] == [0.5, 0.5]
    assert [t.reward - a for t, a in zip(group, alone, strict=True)] == [0.0, 10.0]


async def test_without_rubric_the_step_rewards_count() -> None:
    trajectory = played(0.25, 0.5)
    await score(relax.Env(), trajectory)
    await score_group(relax.Env(), [trajectory])
    assert trajectory.rewards == {"env": 0.75} and trajectory.reward == 0.75


def test_methods_are_inherited_and_overridden() -> None:
    class Stricter(Judged):
        @relax.reward(weight=3.0)
        async def bonus(self, trajectory: Trajectory) -> bool:
            return False

    assert {name: weight for name, (_, weight) in reward_methods(Stricter()).items()} == {"recorded_only": 0.0, "bonus": 3.0}


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), None, "many", [1.0], pytest.param(object(), id="an object")], ids=repr
)
async def test_what_is_no_reward(value: Any) -> None:
    class Odd(relax.Env):
        @relax.reward
        def odd(self, trajectory: Trajectory) -> Any:
            return value

    with pytest.raises(RewardError, match="reward 'odd'"):
        await score(Odd(), played(1.0))
    with pytest.raises(RewardError, match="'here'"):
        finite("here", value)


async def test_a_reward_that_raises_is_named() -> None:
    async def crash(trajectory: Trajectory) -> float:
        raise ZeroDivisionError("no turns")

    class Odd(relax.Env):
        rubric = Rubric([crash])

    with pytest.raises(RewardError, match="reward 'crash' raised ZeroDivisionError: no turns") as caught:
        await score(Odd(), played())
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0, 3.0], [1.0, float("nan")], 5.0, None, [1.0, None]], ids=repr)
async def test_what_is_no_group_reward(values: Any) -> None:
    def odd(group: Sequence[Trajectory]) -> Any:
        return values

    class Odd(relax.Env):
        rubric = Rubric(group_functions=[odd])

    with pytest.raises(RewardError, match="'odd'"):
        await score_group(Odd(), [played(1.0), played(0.0)])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Rubric([length], weights=[1.0, 2.0]), "1 functions but 2 weights"),
        (lambda: Rubric(group_functions=[rank], group_weights=[]), "1 functions but 0 weights"),
        (lambda: Rubric([length, length]), "names must differ"),
        (lambda: Rubric([length], group_functions=[length]), "names must differ"),  # type: ignore[list-item]
        (lambda: Rubric([length], weights=[float("nan")]), r"weights = \[nan\]"),
        (lambda: Rubric([env]), "'env' is the sum of the step rewards"),
    ],
)
def test_a_rubric_that_cannot_be(make: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        make()


async def test_two_rewards_of_one_name_are_refused() -> None:
    def bonus(trajectory: Trajectory) -> float:
        return 0.0

    class Twice(Judged):
        rubric = Rubric([bonus])

    with pytest.raises(ConfigError, match="'bonus'"):
        await score(Twice(), played(1.0))


def two(trajectory: Trajectory, other: Trajectory) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(functions=[two]), r"two\(trajectory.*f\(trajectory: Trajectory\) -> float"),
        (dict(group_functions=[two]), r"two\(trajectory.*f\(trajectories: list\[Trajectory\]\) -> list\[float\]"),
        (dict(group_functions=[lambda: [0.0]]), "cannot be called with one argument"),
        (dict(functions=[0.5]), "0.5 is not a function"),
    ],
)
def test_a_function_of_another_signature_is_refused_with_the_right_one(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Rubric(**wrong)


async def test_a_group_function_that_takes_it_for_one_trajectory_is_told_what_it_gets() -> None:
    class Grouped(relax.Env):
        rubric = Rubric(group_functions=[lambda trajectory: [trajectory.reward]])

    with pytest.raises(RewardError, match=r"no attribute 'reward'.*list\[Trajectory\]\) -> list\[float\]"):
        await score_group(Grouped(), [played(1.0), played(0.0)])
