"""Groups: they always finish, by the failure policy, and group rewards see them whole."""

import asyncio
import gc
import itertools
from types import SimpleNamespace

import pytest
from relax_server.roles import rollout as rollout_role
from relax_server.roles.messages import Published, Warn
from relax_server.rollout import group
from relax_server.rollout.episode import Episode
from rollout_bench import until

import relax_sdk as relax
from relax_sdk import Rubric, Status


class Flaky(relax.Env):
    """Fails in the resets that `fails(number)` names, counted over the group from 0; remembers every one."""

    blocking = False
    resets: list
    fails = staticmethod(lambda number: False)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        number = len(self.resets)
        self.resets.append((seed, float(self.np_random.random())))
        if self.fails(number):
            raise ValueError(f"reset {number}")
        return "go", {}

    def step(self, action):
        return None, 1.0, True, False, {}


def flaky(fails, **more):
    return type("Made", (Flaky,), dict(fails=staticmethod(fails), resets=[], **more))


async def test_episodes_of_a_large_group_are_made_when_those_before_them_have_places(bench, monkeypatch):
    monkeypatch.setattr(group, "QUEUED", 4)
    monkeypatch.setattr(group, "AT_ONCE", 1)
    gate = asyncio.Event()

    class Waits(relax.Env):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return "go", {}

        async def step(self, action):
            await gate.wait()
            return None, 1.0, True, False, {}

    made = bench(Waits, group_size=40, concurrency=3)
    states = made.worker.context.tally.states
    playing = asyncio.create_task(made.group())
    await until(lambda: (states["running"], states["queued"]) == (3, 4))
    gate.set()
    result = await playing
    assert [t.status for t in result.group.trajectories] == [Status.COMPLETED] * 40

    gate.clear()
    playing = asyncio.create_task(made.group())
    await until(lambda: (states["running"], states["queued"]) == (3, 4))
    playing.cancel()
    await asyncio.wait({playing}, timeout=10)
    assert playing.cancelled() and states["cancelled"] == 7, "the others were never made"


async def test_members_and_attempts_of_a_group_have_one_seed_and_see_the_same(bench):
    env = flaky(lambda number: number in (1, 3))
    made = bench(env, group_size=3, max_retries=2)
    result = await made.group()
    assert [t.status for t in result.group.trajectories] == [Status.COMPLETED] * 3
    assert sorted(t.attempts for t in result.group.trajectories) == [1, 1, 3]
    assert result.failures == {"EnvError": 2}
    assert len(env.resets) == 5 and len(set(env.resets)) == 1
    assert {t.seed for t in result.group.trajectories} == {env.resets[0][0]}
    await made.group(1)
    assert len(set(env.resets)) == 2  # another task has another seed


class Drawn(relax.Env):
    """Asks for a number that is drawn by `draw(self)` where an episode begins."""

    draw = staticmethod(lambda env: env.np_random.integers(10**9))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"{type(self).draw(self)}?", {}

    def step(self, action):
        return None, 1.0, True, False, {}


async def test_a_group_that_is_not_shown_one_first_observation_is_counted_and_told_once(bench, monkeypatch):
    made = bench(Drawn, group_size=4)
    group = (await made.group()).group
    assert len({t.messages[0]["content"] for t in group.trajectories}) == 1
    assert made.worker.stats().unlike_groups == 0
    numbers = itertools.count()
    made = bench(type("Unseeded", (Drawn,), dict(draw=staticmethod(lambda env: next(numbers)))), group_size=4)
    for index in range(2):
        assert len({t.messages[0]["content"] for t in (await made.group(index)).group.trajectories}) == 4
    assert made.worker.stats().unlike_groups == 2
    assert [message.text.split(":")[0] for message in await warnings(made, monkeypatch)] == ["test-v0"]


async def warnings(made, monkeypatch):
    """What the rollout's process warns of while it reports its figures a few times."""
    monkeypatch.setattr(rollout_role, "STATS_SECONDS", 0.0)
    role, sent = reporting_role(made)
    reporting = asyncio.create_task(role.report())
    await until(lambda: len(sent) > 5)
    reporting.cancel()
    return [message for message in sent if isinstance(message, Warn)]


def reporting_role(made):
    """A role that has a worker and a channel alone, and what it sends."""
    role, sent = object.__new__(rollout_role.RolloutRole), []
    role.worker, role.channel, role.stepped = made.worker, SimpleNamespace(send=sent.append), asyncio.Event()
    return role, sent


async def test_figures_are_reported_at_every_step_however_fast_steps_are(bench, monkeypatch):
    monkeypatch.setattr(rollout_role, "STATS_SECONDS", 1000.0)
    role, sent = reporting_role(bench(Drawn, group_size=4))
    reporting = asyncio.create_task(role.report())
    for step in range(1, 4):
        await until(lambda step=step: len(sent) == step)
        await role.handle(Published(step, step, 0))
    await until(lambda: len(sent) == 4)
    reporting.cancel()
    assert [report.by_clock for report in sent] == [True, False, False, False]


async def test_steps_do_not_put_off_the_figures_that_the_clock_asks_for(bench, monkeypatch):
    monkeypatch.setattr(rollout_role, "STATS_SECONDS", 0.05)
    role, sent = reporting_role(bench(Drawn, group_size=4))
    reporting = asyncio.create_task(role.report())
    step = 0
    while sum(report.by_clock for report in sent) < 4:
        step += 1
        await role.handle(Published(step, step, 0))
        await asyncio.sleep(0.01)
        assert step < 1000, "steps came before the clock each time"
    reporting.cancel()
    assert not all(report.by_clock for report in sent)


async def test_what_still_fails_after_the_retries_is_dropped(bench):
    result = await bench(flaky(lambda number: number in (0, 3)), group_size=3, max_retries=1).group()
    assert len(result.group.trajectories) == 2 and len(result.trajectories) == 3
    assert result.failures == {"EnvError": 2}
    assert {t.group_size for t in result.group.trajectories} == {3}


async def test_count_keeps_a_failed_episode_without_a_reward(bench):
    result = await bench(flaky(lambda number: number == 0), group_size=3, on_failure="count").group()
    statuses = sorted(t.status for t in result.group.trajectories)
    assert statuses == [Status.COMPLETED, Status.COMPLETED, Status.FAILED]
    assert [t.failure for t in result.group.trajectories if t.status is Status.FAILED] == ["EnvError"]
    assert all(t.failure is None for t in result.group.counted) and len(result.group.counted) == 2
    assert result.failures == {"EnvError": 1}


async def test_drop_does_not_try_again(bench):
    env = flaky(lambda number: number == 0)
    result = await bench(env, group_size=3, on_failure="drop", max_retries=5).group()
    assert len(result.group.trajectories) == 2 and len(env.resets) == 3


@pytest.mark.parametrize("policy", ["retry", "count", "drop"])
async def test_a_group_without_a_usable_episode_is_none(bench, policy):
    result = await bench(flaky(lambda number: True), group_size=2, on_failure=policy).group()
    assert result.group is None and len(result.trajectories) == 2
    assert "raised ValueError: reset" in result.error


async def test_ids_and_seeds_are_the_same_whenever_a_group_is_played(bench):
    ids = []
    for _ in range(2):
        result = await bench(flaky(lambda *_: False), group_size=2).group(4)
        ids.append([(result.group.id, t.id, t.seed, t.group_index) for t in result.group.trajectories])
    assert ids[0] == ids[1] and ids[0][0][:2] == ("run/train/4", "run/train/4/0")


def lengths(trajectories):
    return [float(len(trajectories)) for _ in trajectories]


async def best(trajectories):
    await asyncio.sleep(0)
    return [float(i == 0) for i, _ in enumerate(trajectories)]


async def test_group_rewards_see_the_whole_group(bench):
    env = flaky(lambda *_: False, rubric=Rubric(group_functions=[lengths, best], group_weights=[0.1, 1.0]))
    result = await bench(env, group_size=4).group()
    assert [t.rewards for t in result.group.trajectories] == [
        {"env": 1.0, "lengths": 4.0, "best": float(i == 0)} for i in range(4)
    ]
    assert [t.reward for t in result.group.trajectories] == pytest.approx([2.4, 1.4, 1.4, 1.4])


async def test_group_rewards_see_usable_episodes_only(bench):
    env = flaky(lambda number: number == 0, rubric=Rubric(group_functions=[lengths]))
    result = await bench(env, group_size=3, on_failure="count").group()
    assert sorted(t.reward for t in result.group.trajectories) == [0.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda trajectories: [1.0], "returned 1 values for 2 trajectories"),
        (lambda trajectories: 1 / 0, "raised ZeroDivisionError"),
        (lambda trajectories: [1.0, float("nan")], "nan"),
        (lambda trajectories: None, "NoneType"),
    ],
)
async def test_a_group_reward_that_fails_leaves_no_group(bench, function, expected):
    env = flaky(lambda *_: False, rubric=Rubric(group_functions=[function]))
    made = bench(env, group_size=2)
    result = await made.group(6)
    assert result.group is None and result.failures == {"RewardError": 1}
    assert result.error.startswith("test-v0, train task 6, group reward: ") and expected in result.error
    assert [t.reward for t in result.trajectories] == [1.0, 1.0]


async def test_environments_stay_open_for_group_rewards_and_are_closed_after(bench):
    opened, closed = [], []

    def alive(trajectories):
        assert len(closed) < len(opened)
        return lengths(trajectories)

    class Closing(flaky(lambda *_: False, rubric=Rubric(group_functions=[alive]))):
        def __init__(self):
            opened.append(self)

        def close(self):
            closed.append(self)

    made = bench(Closing, group_size=3)
    assert (await made.group()).group is not None
    await until(lambda: not made.worker.context.tasks)
    assert len(opened) == len(closed) == 3


async def test_cancelling_a_group_cancels_its_episodes(bench):
    made = bench(flaky(lambda *_: False), group_size=5)
    made.engine.hold.clear()
    playing = asyncio.create_task(made.group())
    await until(lambda: len(made.engine.running) == 5)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await until(lambda: not made.worker.context.tasks)
    assert made.worker.stats().states == {"cancelled": 5}
    await until(lambda: len(made.engine.aborted) == 5)


async def test_a_group_prefers_one_engine(bench, processor):
    from scripted_engine import ScriptedEngine

    made = bench(flaky(lambda *_: False), group_size=6)
    other = ScriptedEngine(processor, url="scripted://b")
    made.pool.add(other)
    results = await asyncio.gather(*(made.group(i) for i in range(4)))
    for result in results:
        assert len({turn.engine for t in result.group.trajectories for turn in t.turns}) == 1
    assert len(made.engine.requests) == len(other.requests) == 12


async def test_episodes_leave_no_work_for_the_garbage_collector(bench):
    """A thousand episodes a second in reference cycles took a sixth of the rollout's processor time to be found again."""
    made = bench(flaky(lambda number: False), group_size=4)
    await made.group()
    gc.collect()
    before = [thing for thing in gc.get_objects() if isinstance(thing, Episode)]  # of tests that broke something
    gc.disable()
    try:
        result = await made.group()
        left = [thing for thing in gc.get_objects() if isinstance(thing, Episode) and thing not in before]
    finally:
        gc.enable()
    assert len(result.group.trajectories) == 4
    assert not left
