"""The rollout worker: admission, durability, restarts, evaluation, and how it ends."""

import asyncio
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from relax_server.journal import open_journal
from relax_server.rollout.evaluation import summarise
from rollout_bench import until

import relax_sdk as relax
from relax_sdk import AssistantMessage, EnvSpec, JournalError, Message, RunError, Status, Text, Trajectory


class Ask(relax.Env):
    """Asks for the row's answer."""

    blocking = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.answer = str(options["task"].get("answer", "A"))
        return f"say {self.answer}", {}

    def step(self, action):
        return None, float(action.text == self.answer), True, False, {}


def rows(n, answer="A"):
    return [{"answer": answer} for _ in range(n)]


async def play(made, groups):
    """Run until so many groups are committed, then stop."""
    running = asyncio.create_task(made.worker.run())
    await until(lambda: running.done() or made.worker.admission.committed >= groups)
    made.worker.stop()
    await running


async def test_groups_are_played_in_task_order_and_durable(bench):
    made = bench(Ask, group_size=3, groups_per_step=2)
    await play(made, 4)
    found = made.journal.groups("run", newest_first=False)
    assert sorted(g.task_index for g in found) == [0, 1, 2, 3]
    assert {len(g.trajectories) for g in found} == {3}
    assert made.journal.counts("run").ready == 4
    stats = made.worker.stats()
    assert (stats.committed, stats.in_flight, stats.outstanding, stats.limit) == (4, 0, 4, 4)
    assert stats.states == {"completed": 12} and stats.failures == {} and stats.episodes_per_second > 0


async def test_no_group_starts_beyond_admission_until_the_trainer_consumes(bench):
    made = bench(Ask, groups_per_step=3, run_config={"max_staleness": 1})
    running = asyncio.create_task(made.worker.run())
    await until(lambda: made.worker.admission.committed == 6)
    assert made.worker.admission.outstanding == 6
    made.engine.version = 1
    made.worker.update(version=1, consumed=3)
    await until(lambda: made.worker.admission.committed == 9)
    made.worker.update(dropped=2)
    await until(lambda: made.worker.admission.committed == 11)
    assert made.worker.stats().version == made.pool.version == 1
    made.worker.stop()
    await running
    assert made.journal.counts("run").ready == 11


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    staleness=st.integers(0, 3),
    per_step=st.integers(1, 4),
    failing=st.sets(st.integers(0, 30), max_size=7),  # eight at the beginning would end the run
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=6),
    data=st.data(),
)
async def test_admission_never_exceeds_its_bound_and_always_reaches_it(bench, staleness, per_step, failing, steps, data):
    """Whatever is consumed, dropped or fails, and whenever; looked at in every reset."""
    limit, seen = (staleness + 1) * per_step, []

    class Sometimes(Ask):
        def reset(self, *, seed=None, options=None):
            seen.append(made.worker.admission.outstanding)
            if options["task"]["index"] in failing:
                raise ValueError("fails")
            return super().reset(seed=seed, options=options)

    made = bench(
        Sometimes, groups_per_step=per_step, max_retries=0, run_config={"max_staleness": staleness}, max_failed_groups=99
    )
    admission = made.worker.admission
    running = asyncio.create_task(made.worker.run())
    for consumed, dropped in [*steps, (0, 0)]:
        await until(lambda: running.done() or (admission.in_flight == 0 and admission.outstanding == limit))
        free = admission.committed - admission.consumed - admission.dropped
        consumed = min(consumed, free)
        dropped = min(dropped, free - consumed)
        made.worker.update(consumed=admission.consumed + consumed, dropped=admission.dropped + dropped)
    made.worker.stop()
    await running
    assert seen and max(seen) <= limit
    played = made.journal.task_indices("run")
    assert not failing & set(played)
    await made.worker.close()


async def test_no_more_groups_are_played_than_the_steps_of_the_run_need(bench):
    made = bench(Ask, groups_per_step=2, run_config={"max_staleness": 3, "steps": 2})
    running = asyncio.create_task(made.worker.run())
    await until(lambda: made.worker.admission.committed == 4)
    made.worker.update(consumed=2)
    await until(lambda: not made.worker._changed.is_set())
    made.worker.update(dropped=1)  # too old at its lease: another one is played
    await until(lambda: made.worker.admission.committed == 5)
    made.worker.update(consumed=4)
    await made.worker.drain()
    await running
    assert made.journal.counts("run").ready == 5 and made.worker.admission.outstanding == 0


async def test_a_restart_plays_what_is_missing_and_counts_what_is_unconsumed(bench):
    first = bench(Ask, groups_per_step=4, run_config={"max_staleness": 0})
    await play(first, 4)
    first.journal.lease(2, "run", "trainer", 0, 0, 60.0)
    found = first.journal.groups("run", newest_first=False)
    first.journal.ack([g.id for g in found[:2]], "run", "trainer", 1)

    second = bench(Ask, groups_per_step=4, run_config={"max_staleness": 0})
    second.journal.close()
    second.worker.journal = second.worker._committer.journal = second.journal = open_journal(first.journal.path)
    await play(second, 6)
    assert second.worker.admission.consumed == 2
    assert second.journal.task_indices("run") == [0, 1, 2, 3, 4, 5]
    assert len(second.engine.requests) == 2, "only the two new groups were played"


async def test_a_gap_in_the_journal_is_played_first(bench):
    made = bench(Ask, groups_per_step=3, run_config={"max_staleness": 0})
    for index in (0, 2):
        made.journal.commit((await made.group(index)).group, "run")
    await play(made, 3)
    assert made.journal.task_indices("run") == [0, 1, 2]


async def test_the_run_ends_when_too_many_groups_in_a_row_are_unusable(bench):
    class Broken(Ask):
        def reset(self, *, seed=None, options=None):
            raise ValueError("no data")

    made = bench(Broken, max_failed_groups=5, group_size=2, max_retries=0)
    with pytest.raises(RunError, match=r"5 groups in a row had no usable episode.*raised ValueError: no data") as caught:
        await made.worker.run()
    assert "run run:" in str(caught.value)
    assert made.worker.stats().failures["EnvError"] >= 10


async def test_a_run_whose_first_groups_all_fail_in_the_same_way_ends_early(bench):
    class Broken(Ask):
        def reset(self, *, seed=None, options=None):
            raise ValueError(f"no data for task {options['task']['index']}")

    made = bench(Broken, groups_per_step=10, group_size=1, max_retries=0, concurrency=1)
    with pytest.raises(RunError, match=r"10 groups in a row had no usable episode.*raised ValueError: no data for task"):
        await made.worker.run()


async def test_first_groups_that_fail_in_different_ways_do_not_end_a_run_early(bench):
    class Unlucky(Ask):
        def reset(self, *, seed=None, options=None):
            index = options["task"]["index"]
            if index < 20:
                raise [ValueError, KeyError][index % 2]("no data")
            return super().reset(seed=seed, options=options)

    made = bench(Unlucky, groups_per_step=4, group_size=1, max_retries=0, concurrency=1)
    await play(made, 4)


async def test_a_usable_group_in_between_resets_that_count(bench):
    class Half(Ask):
        def reset(self, *, seed=None, options=None):
            if options["task"]["index"] % 3:
                raise ValueError("no data")
            return super().reset(seed=seed, options=options)

    made = bench(Half, max_failed_groups=3, groups_per_step=8, max_retries=0, concurrency=1)
    await play(made, 8)
    assert made.worker.stats().failures["EnvError"] >= 14


async def test_failed_attempts_are_told_by_the_row_of_their_task(bench):
    class Broken(Ask):
        def reset(self, *, seed=None, options=None):
            if options["task"]["index"] == 1:
                raise ValueError("no data")
            return super().reset(seed=seed, options=options)

    tasks = [{"index": i} for i in range(4)]
    made = bench(Broken, tasks=tasks, max_failed_groups=3, groups_per_step=8, group_size=2, max_retries=1)
    await play(made, 8)
    stats = made.worker.stats()
    (worst,) = stats.failing_tasks
    assert worst == (1, stats.failed_attempts) and stats.failed_attempts >= 4, "rows come again under other indices"
    assert (stats.tasks, stats.tasks_played, stats.failing_tasks_total) == (4, 4, 1)


async def test_the_run_ends_when_the_tasks_run_out(bench):
    made = bench(Ask, tasks=lambda: iter(rows(2)))
    with pytest.raises(RunError, match="the generator ended before row 2"):
        await made.worker.run()


async def test_the_run_ends_when_the_journal_fails(bench, monkeypatch):
    made = bench(Ask)

    def commit_many(groups, run, split="train", owner=None, held=None):
        raise JournalError("disk full")

    monkeypatch.setattr(made.journal, "commit_many", commit_many)
    with pytest.raises(RunError, match="the rollout stopped with 0 groups committed: disk full"):
        await made.worker.run()


async def test_groups_that_wait_are_committed_in_one_go(bench, monkeypatch):
    made = bench(Ask, groups_per_step=32, run_config={"max_staleness": 0})
    sizes, commit_many = [], made.journal.commit_many

    def counted(groups, *place):
        sizes.append(len(groups))
        return commit_many(groups, *place)

    monkeypatch.setattr(made.journal, "commit_many", counted)
    await play(made, 32)
    assert made.journal.counts("run").ready == 32
    assert max(sizes, default=0) > 1


async def test_pause_sends_nothing_and_resume_goes_on(bench):
    """Paused from the first model call on; the clocks of the episode are shorter than the pause."""
    made = bench(Ask, groups_per_step=4, run_config={"max_staleness": 0}, turn_timeout=0.3, episode_timeout=0.3, max_retries=0)
    made.worker.pause()
    playing = asyncio.create_task(made.group(0))
    await until(lambda: made.worker.stats().states == {"running": 1})
    await asyncio.sleep(0.4)
    assert made.engine.requests == [] and not playing.done() and made.worker.stats().paused
    running = asyncio.create_task(made.worker.run())
    made.worker.resume()
    assert (await playing).group is not None
    await until(lambda: made.worker.admission.committed == 4)
    made.worker.stop()
    await running


async def test_drain_commits_what_is_in_flight_and_starts_nothing(bench):
    made = bench(Ask, groups_per_step=3, run_config={"max_staleness": 0})
    made.engine.hold.clear()
    running = asyncio.create_task(made.worker.run())
    await until(lambda: len(made.engine.running) == 3)
    draining = asyncio.create_task(made.worker.drain())
    made.worker.update(consumed=3)
    await asyncio.sleep(0)
    assert not draining.done()
    made.engine.hold.set()
    await draining
    assert made.journal.counts("run").ready == 3
    await running


async def test_stop_cancels_what_is_in_flight(bench):
    made = bench(Ask, groups_per_step=3, run_config={"max_staleness": 0})
    made.engine.hold.clear()
    running = asyncio.create_task(made.worker.run())
    await until(lambda: len(made.engine.running) == 3)
    made.worker.stop()
    await running
    assert made.worker.stats().states == {"cancelled": 3} and made.journal.counts("run").total == 0
    assert made.worker.stats().in_flight == 0


async def test_stop_leaves_an_evaluation_alone(bench):
    made = bench(Ask, tasks=EVAL, groups_per_step=3, run_config={"max_staleness": 0})
    made.engine.hold.clear()
    running = asyncio.create_task(made.worker.run())
    evaluating = asyncio.create_task(made.worker.evaluate())
    await until(lambda: len(made.engine.running) == 7)
    made.worker.stop()
    await running
    assert len(made.engine.running) == 4
    made.engine.hold.set()
    assert (await evaluating).n == 4


async def test_no_more_episodes_are_in_flight_than_allowed(bench):
    made = bench(Ask, group_size=8, groups_per_step=4, concurrency=5)
    made.engine.hold.clear()
    running = asyncio.create_task(made.worker.run())
    await until(lambda: len(made.engine.running) == 5)
    made.engine.hold.set()
    await until(lambda: made.worker.admission.committed == 8)
    made.worker.stop()
    await running
    assert made.engine.most_running == 5


async def test_two_thousand_episodes_at_once(bench):
    made = bench(Ask, group_size=20, groups_per_step=100, concurrency=2000, run_config={"max_staleness": 0})
    made.engine.hold.clear()
    running = asyncio.create_task(made.worker.run())
    await until(lambda: len(made.engine.running) == 2000, 60)
    made.engine.hold.set()
    await until(lambda: made.worker.admission.committed == 100, 60)
    made.worker.stop()
    await running
    assert made.engine.most_running == 2000 and made.worker.stats().states == {"completed": 2000}


# ------------------------------------------------------------------------------------------------------------ evaluation

EVAL = {"train": rows(4), "eval": [{"answer": "A"}, {"answer": "A"}, {"answer": "A"}, {"answer": "B"}]}


async def test_evaluation_plays_the_eval_split_greedily_with_an_interval(bench):
    made = bench(Ask, "A", tasks=EVAL)
    made.engine.version = 3
    result = await made.worker.evaluate()
    assert (result.mean_reward, result.n, result.components) == (0.75, 4, {"env": 0.75})
    deviation = np.std([1, 1, 1, 0], ddof=1)
    assert result.ci95 == pytest.approx(1.959964 * deviation / 2)
    assert (result.version_min, result.version_max) == (3, 3) and result.failures == {}
    assert {r.sampling.temperature for r in made.engine.requests} == {0.0}
    assert [t.task_index for t in result.trajectories] == [0, 1, 2, 3]


async def test_evaluation_tells_how_far_it_is(bench):
    told = []
    await bench(Ask, "A", tasks=EVAL).worker.evaluate(on_played=told.append)
    assert [played.episodes for played in told] == [1, 2, 3, 4] and {played.of for played in told} == {4}
    assert f"{'━' * 20} 4 of 4 episodes, mean reward 0.750 · " in str(told[-1]) and str(told[-1]).endswith(" a second")


async def test_evaluation_can_be_limited_and_sampled(bench):
    made = bench(Ask, "A", tasks=EVAL)
    assert (await made.worker.evaluate(2, greedy=False)).n == 2
    assert {r.sampling.temperature for r in made.engine.requests} == {1.0}


async def test_evaluations_are_in_the_journal_under_ids_of_their_own_and_never_leased(bench):
    made = bench(Ask, "A", tasks=EVAL)
    await made.worker.evaluate()
    await made.worker.evaluate()
    made.engine.version = 7
    made.worker.update(version=7)
    await made.worker.evaluate()
    await made.worker.evaluate(step=50)
    ids = {g.id for g in made.journal.groups("run", split="eval")}
    assert ids == {f"run/eval/{label}/{i}" for label in ("0", "0.1", "7", "50") for i in range(4)}
    assert made.journal.counts("run").total == 0


async def test_evaluation_runs_beside_training(bench):
    made = bench(Ask, "A", tasks=EVAL, groups_per_step=2)
    running = asyncio.create_task(made.worker.run())
    assert (await made.worker.evaluate()).n == 4
    await until(lambda: made.worker.admission.committed == 4)
    assert not running.done()
    made.worker.stop()
    await running


async def test_episodes_that_fail_in_an_evaluation_are_kept_and_are_in_no_mean(bench):
    class Picky(Ask):
        def reset(self, *, seed=None, options=None):
            if options["task"]["answer"] == "B":
                raise ValueError("B")
            return super().reset(seed=seed, options=options)

    made = bench(Picky, "A", tasks=EVAL)
    result = await made.worker.evaluate()
    assert (result.mean_reward, result.n, result.failures) == (1.0, 3, {"EnvError": 1})
    kept = {t.task_index: t for g in made.journal.groups("run", split="eval") for t in g.trajectories}
    failed = [t for t in kept.values() if t.failure is not None]
    assert len(kept) == 4 and [t.failure for t in failed] == ["EnvError"] and "raised ValueError: B" in str(failed[0].error)
    assert made.worker.stats().failures == {"EnvError": 2}, "it was tried twice"


async def test_an_evaluation_without_a_usable_episode_is_an_error(bench):
    class Broken(Ask):
        def reset(self, *, seed=None, options=None):
            raise ValueError("no data")

    with pytest.raises(RunError, match=r"none of 4 episodes was usable.*no data"):
        await bench(Broken, tasks=EVAL).worker.evaluate()


async def test_an_unknown_split_is_an_error_that_lists_the_known_ones(bench):
    with pytest.raises(relax.ConfigError, match="no 'eval' split; there are train"):
        await bench(Ask, tasks=rows(2)).worker.evaluate()


def test_the_interval_of_one_episode_is_unbounded():
    one = Trajectory("t", "e", "0", 0, "g", 0, 1, 0, Status.COMPLETED, reward=1.0, rewards={"env": 1.0})
    assert summarise([one]).ci95 == float("inf")


# --------------------------------------------------------------------------------------------------------------- by hand


async def test_the_model_can_be_tried_by_hand(bench):
    made = bench(Ask, "hello")
    answer = await made.worker.generate(
        [Message("user", (Text("hi"), relax.Image.from_array(np.zeros((64, 64, 3), np.uint8))))]
    )
    assert isinstance(answer, AssistantMessage) and answer.text == "hello"
    assert made.journal.counts("run").total == 0


async def test_tasks_may_come_from_a_generator(bench):
    made = bench(Ask, tasks=lambda: ({"answer": "A", "i": i} for i in itertools.count()), groups_per_step=2)
    await play(made, 4)
    assert made.journal.task_indices("run") == [0, 1, 2, 3]


async def test_an_environment_of_the_package_plays(bench, processor, tmp_path):
    """`omni-quiz-v0`: three turns with sound, picture and film; a policy that always says A."""
    from relax_server.rollout import RolloutWorker

    made = bench(Ask)
    spec = relax.get_spec("omni-quiz-v0")
    assert isinstance(spec, EnvSpec)
    made.worker, old = (
        RolloutWorker(spec, made.worker.config, processor, made.pool, made.store, made.journal, "quiz"),
        made.worker,
    )
    result = await made.worker.evaluate(4)
    assert result.n == 4 and 0.0 <= result.mean_reward <= 3.0
    assert {len(t.turns) for t in result.trajectories} == {3}
    assert [m.kind for m in result.trajectories[0].samples()[0].media] == ["audio", "image", "video"]
    await old.close()
