"""Episodes: what is recorded, what an environment may get wrong, limits, time-outs, cancelling and aborts."""

import asyncio
import threading
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from relax_server.rollout.episode import Episode
from relax_server.rollout.task import EpisodeTask
from rollout_bench import until

import relax_sdk as relax
from relax_sdk import EngineAborted, EngineError, SamplingParams, Status
from relax_sdk.trajectory import derive_seed

HANG = threading.Event()
"""Never set while a test needs it hanging."""


@pytest.fixture(autouse=True)
def let_hanging_threads_go():
    HANG.clear()
    yield
    HANG.set()


class Count(relax.Env):
    """Counts turns; over after `turns` of them."""

    system_prompt = "count"

    def __init__(self, turns: int = 1) -> None:
        self.turns, self.seen = turns, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"task {options['task']['index']}", {}

    def step(self, action):
        self.seen += 1
        return f"turn {self.seen}", 0.5, self.seen >= self.turns, False, {"seen": np.int64(self.seen), "self": self}


def env_with(**methods: Any) -> type[relax.Env]:
    return type("Made", (Count,), methods)


async def only(bench, env, *arguments, row=None, **options):
    """The one trajectory of a group of one."""
    made = bench(env, *arguments, **({"max_retries": 0} | options))
    result = await made.group(7, row)
    return result.trajectories[0], made


async def test_an_episode_leaves_tokens_messages_rewards_seed_and_times(bench, processor):
    trajectory, made = await only(bench, Count, "A", kwargs={"turns": 2})
    assert trajectory.status is Status.COMPLETED and trajectory.error is None
    assert [m["role"] for m in trajectory.messages] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert [m["content"] for m in trajectory.messages] == ["count", "task 7", "A", "turn 1", "A", "turn 2"]
    assert (
        trajectory.reward == 1.0 and trajectory.rewards == {"env": 1.0} and [t.reward for t in trajectory.turns] == [0.5, 0.5]
    )
    assert trajectory.seed == derive_seed(0, "train", 7)
    assert trajectory.info == {"seen": 2}
    assert set(trajectory.timings) == {"queued", "reset", "generate", "step", "score", "total"}
    assert trajectory.turns[0].engine == made.engine.url
    text = processor.decode(trajectory.turns[1].prompt_ids + trajectory.turns[1].response_ids)
    assert text == (
        "<|im_start|>system\ncount<|im_end|>\n<|im_start|>user\ntask 7<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nturn 1<|im_end|>\n<|im_start|>assistant\nA<|im_end|>"
    )
    assert len(trajectory.samples()) == 1


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_plain_methods_run_in_a_thread_unless_the_class_says_they_are_quick(bench, blocking, asynchronous):
    places = []

    def note():
        places.append(threading.current_thread() is threading.main_thread())

    class Plain(Count):
        def reset(self, *, seed=None, options=None):
            note()
            return super().reset(seed=seed, options=options)

        def step(self, action):
            note()
            return super().step(action)

        @relax.reward
        def bonus(self, trajectory):
            note()
            return 1.0

    class Async(Count):
        async def reset(self, *, seed=None, options=None):
            await asyncio.sleep(0)
            note()
            return super().reset(seed=seed, options=options)

        async def step(self, action):
            await asyncio.sleep(0)
            note()
            return super().step(action)

        @relax.reward
        async def bonus(self, trajectory):
            note()
            return 1.0

    env = Async if asynchronous else Plain
    env.blocking = blocking
    trajectory, _ = await only(bench, env)
    assert (
        trajectory.status is Status.COMPLETED and trajectory.rewards == {"env": 0.5, "bonus": 1.0} and trajectory.reward == 1.5
    )
    assert places == [asynchronous or not blocking] * 3


def returning(value):
    return lambda self, *_, **__: value


def raising(error):
    def method(self, *_, **__):
        raise error

    return method


BAD_ENVIRONMENTS = {
    "reset raises": (dict(reset=raising(KeyError("boom"))), "turn 0, reset: raised KeyError: 'boom'"),
    "reset exits": (dict(reset=raising(SystemExit(1))), "reset: raised SystemExit"),
    "reset cancels itself": (dict(reset=raising(asyncio.CancelledError())), "reset: raised CancelledError"),
    "reset returns one thing": (dict(reset=returning("hello")), r"reset must return \(observation, info\), got str"),
    "reset returns three": (dict(reset=returning(("a", {}, 1))), "got a tuple of 3"),
    "reset returns nothing": (dict(reset=returning((None, {}))), "reset returned no observation"),
    "reset info": (dict(reset=returning(("a", [1]))), "info of reset must be a dictionary, got list"),
    "observation number": (dict(reset=returning((3.5, {}))), "an observation must be .* got float"),
    "observation holds a set": (dict(reset=returning((["a", {1}], {}))), "an observation may hold .* got set"),
    "message without role": (dict(reset=returning(({"content": "a"}, {}))), "role"),
    "step raises": (dict(step=raising(ZeroDivisionError("by 0"))), "turn 1, step: raised ZeroDivisionError: by 0"),
    "step times out by itself": (dict(step=raising(TimeoutError("socket"))), "step: raised TimeoutError: socket"),
    "step returns four": (dict(step=returning((None, 0.0, True, {}))), "step must return .* got a tuple of 4"),
    "reward nan": (dict(step=returning((None, float("nan"), True, False, {}))), "the reward of step is nan; it must be finite"),
    "reward inf": (dict(step=returning((None, np.float32("inf"), True, False, {}))), "the reward of step is inf"),
    "reward text": (dict(step=returning((None, "1.0", True, False, {}))), "reward of step must be a number, got str"),
    "reward none": (dict(step=returning((None, None, True, False, {}))), "reward of step must be a number, got NoneType"),
    "terminated is 1": (dict(step=returning((None, 0.0, 1, False, {}))), "terminated must be a bool, got int"),
    "truncated is None": (dict(step=returning((None, 0.0, True, None, {}))), "truncated must be a bool, got NoneType"),
    "info is None": (dict(step=returning((None, 0.0, True, False, None))), "info of step must be a dictionary, got NoneType"),
    "no observation": (dict(step=returning((None, 0.0, False, False, {}))), "must return an observation or end the episode"),
    "placeholder": (dict(reset=returning(("<|image_pad|>", {}))), "must not contain placeholder tokens"),
    "constructor": (dict(__init__=raising(OSError("no display"))), "reset: raised OSError: no display"),
    "reward function raises": (dict(r=relax.reward(raising(ValueError("x")))), "score: reward .* raised ValueError: x"),
    "reward function nan": (dict(r=relax.reward(returning(float("nan")))), "score: reward 'r' is nan"),
}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("name", BAD_ENVIRONMENTS)
async def test_what_an_environment_gets_wrong_is_told_with_its_place(bench, name, blocking):
    methods, expected = BAD_ENVIRONMENTS[name]
    trajectory, made = await only(bench, env_with(**methods, blocking=blocking))
    assert trajectory.status is Status.FAILED
    assert trajectory.error.startswith("test-v0, train task 7, sample 0, turn ")
    with pytest.raises(AssertionError, match=expected):
        raise AssertionError(trajectory.error)
    assert trajectory.reward == 0.0 and sum(made.worker.stats().failures.values()) == 1


async def test_an_error_names_the_line_that_raised_it(bench):
    trajectory, _ = await only(bench, env_with(reset=raising(ValueError("x"))))
    assert "raised ValueError: x (test_episode.py:" in trajectory.error


class AsyncHang(Count):
    async def step(self, action):
        await asyncio.Event().wait()


class IgnoresCancel(Count):
    """Swallows its cancellation, then returns in its own time."""

    async def step(self, action):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return super().step(action)


HANGING = {
    "reset": (env_with(reset=lambda self, **_: HANG.wait()), dict(reset_timeout=0.05), "reset: took longer than 0.05 s"),
    "step": (env_with(step=lambda self, _: HANG.wait()), dict(step_timeout=0.05), "step: took longer than 0.05 s"),
    "async step": (AsyncHang, dict(step_timeout=0.05), "step: took longer than 0.05 s"),
    "swallowed": (IgnoresCancel, dict(step_timeout=0.05), "step: took longer than 0.05 s"),
    "score": (
        env_with(r=relax.reward(lambda self, _: HANG.wait())),
        dict(score_timeout=0.05),
        "score: took longer than 0.05 s",
    ),
    "episode": (AsyncHang, dict(episode_timeout=0.05), "episode: took longer than 0.05 s"),
    "episode swallowed": (IgnoresCancel, dict(episode_timeout=0.05), "episode: took longer than 0.05 s"),
    "episode in a thread": (env_with(step=lambda self, _: HANG.wait()), dict(episode_timeout=0.05), "episode: took longer"),
}


@pytest.mark.parametrize("name", HANGING)
async def test_a_stage_that_hangs_times_out(bench, name):
    env, limits, expected = HANGING[name]
    trajectory, made = await only(bench, env, **limits)
    assert trajectory.status is Status.TIMED_OUT and expected in trajectory.error
    assert made.worker.stats().failures == {"EpisodeTimeout": 1}


async def test_threads_that_hang_do_not_use_up_the_pool(bench):
    made = bench(env_with(step=lambda self, _: HANG.wait()), group_size=300, step_timeout=0.2, max_retries=0)
    result = await made.group()
    assert {t.status for t in result.trajectories} == {Status.TIMED_OUT}
    stats = made.worker.stats()
    assert stats.threads_given_up == stats.threads_stuck == 300
    made.worker.context.env_class = Count
    assert (await made.group(1)).group is not None
    HANG.set()
    await until(lambda: made.worker.stats().threads_stuck == 0)


async def test_an_environment_that_cannot_be_cancelled_is_left_behind(bench, monkeypatch):
    monkeypatch.setattr("relax_server.rollout.episode.GRACE", 0.05)
    let_go = asyncio.Event()

    class Stubborn(Count):
        async def step(self, action):
            while not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    continue
            return super().step(action)

    trajectory, made = await only(bench, Stubborn, episode_timeout=0.05, concurrency=1)
    assert trajectory.status is Status.TIMED_OUT and "ignored its cancellation" in trajectory.error
    assert made.worker.stats().ignored_cancel == 1
    made.worker.context.env_class = Count
    assert (await made.group(1)).group is not None, "its slot must be free again"
    let_go.set()
    await until(lambda: not made.worker.context.tasks)


async def test_waiting_for_a_slot_counts_against_no_limit(bench):
    """Ten episodes of about 0.1 s one after another, each allowed 0.6 s."""

    class Slow(Count):
        async def step(self, action):
            await asyncio.sleep(0.1)
            return super().step(action)

    made = bench(Slow, group_size=10, concurrency=1, episode_timeout=0.6, max_retries=0)
    result = await made.group()
    assert {t.status for t in result.trajectories} == {Status.COMPLETED}
    assert max(t.timings["queued"] for t in result.trajectories) > 0.6


async def test_time_behind_a_pause_stays_excluded_when_it_is_over(bench):
    made = bench(Count)
    made.worker.pause()
    episode = Episode(made.worker.context, EpisodeTask("train", 3, {"index": 3}, "run/train/3", 0, 1, 5, 0, SamplingParams()))
    result = episode.launch()
    await until(lambda: episode.state == "running")
    await asyncio.sleep(0.1)
    during = episode.session.excluded
    made.worker.resume()
    assert (await result).status is Status.COMPLETED
    assert during >= 0.09 and episode.session.excluded >= during


async def test_an_episode_with_too_many_turns_is_truncated_and_scored(bench):
    trajectory, _ = await only(bench, Count, kwargs={"turns": 99}, max_turns=3)
    assert trajectory.status is Status.TRUNCATED and len(trajectory.turns) == 3 and trajectory.reward == 1.5


async def test_the_environment_can_truncate(bench):
    trajectory, _ = await only(bench, env_with(step=returning((None, 1, False, True, {}))))
    assert trajectory.status is Status.TRUNCATED and trajectory.reward == 1.0


async def test_the_token_limit_shortens_the_last_answer_and_then_truncates(bench):
    """The answer is ten tokens; prompts grow until less than ten are left, then none."""
    trajectory, made = await only(bench, Count, "123456789", kwargs={"turns": 99}, max_tokens=200)
    assert trajectory.status is Status.TRUNCATED
    assert all(len(t.prompt_ids) + len(t.response_ids) <= 200 for t in trajectory.turns)
    room = 200 - len(trajectory.turns[-1].prompt_ids)
    assert made.engine.requests[-1].sampling.max_new_tokens == min(room, 32)
    sent = len(made.engine.requests)
    assert sent == len(trajectory.turns) > 2


async def test_a_first_prompt_that_leaves_no_room_is_an_error_with_both_numbers(bench):
    trajectory, _ = await only(bench, Count, max_tokens=20)
    assert trajectory.status is Status.FAILED and "the first prompt has 40 tokens; max_tokens is 20" in trajectory.error


async def test_cancelling_aborts_the_generation_in_flight(bench):
    made = bench(Count)
    made.engine.hold.clear()
    task = EpisodeTask("train", 3, {"index": 3}, "run/train/3", 0, 1, 5, 0, SamplingParams())
    episode = Episode(made.worker.context, task)
    result = episode.launch()
    await until(lambda: bool(made.engine.running))
    (rid,) = made.engine.running
    episode.cancel()
    trajectory = await result
    assert trajectory.status is Status.CANCELLED and "cancelled" in trajectory.error
    await until(lambda: made.engine.aborted == [rid])
    assert made.worker.stats().failures == {}, "cancelling is no failure"


async def test_a_turn_that_was_aborted_from_outside_is_sent_again(bench):
    made = bench(Count)
    made.engine.hold.clear()
    playing = asyncio.create_task(made.group())
    await until(lambda: bool(made.engine.running))
    await made.engine.abort(None)
    await until(lambda: len(made.engine.requests) == 2)
    made.engine.hold.set()
    result = await playing
    assert result.trajectories[0].status is Status.COMPLETED
    first, second = made.engine.requests
    assert first.input_ids == second.input_ids and first.rid != second.rid


async def test_an_engine_that_always_aborts_ends_the_episode_as_cancelled(bench):
    trajectory, made = await only(bench, Count, lambda request: EngineAborted("paused"), turn_timeout=0.1)
    assert trajectory.status is Status.CANCELLED and "times from outside within 0.1 s" in trajectory.error
    assert made.worker.stats().failures == {"EngineAborted": 1}


async def test_an_engine_that_refuses_fails_the_episode(bench):
    trajectory, _ = await only(bench, Count, lambda request: EngineError("context too long"))
    assert trajectory.status is Status.FAILED and trajectory.error.endswith("turn 0, generate: context too long")


async def test_an_engine_that_does_not_answer_times_out(bench):
    made = bench(Count, turn_timeout=0.05, max_retries=0)
    made.engine.hold.clear()
    trajectory = (await made.group()).trajectories[0]
    assert trajectory.status is Status.TIMED_OUT and "did not answer within 0.05 s" in trajectory.error


@pytest.mark.parametrize("own", [None, 3])
async def test_every_answer_has_a_seed_of_its_own_that_follows_from_the_run_and_is_recorded(bench, own):
    async def played(seed, **changes):
        sampling = SamplingParams(max_new_tokens=32, sampling_seed=own)
        made = bench(Count, kwargs={"turns": 2}, group_size=2, run_config={"seed": seed, "sampling": sampling})
        group = (await made.group(**changes)).group
        asked = {(r.rid.split("/")[-3], r.rid.split("/")[-2]): r.sampling.sampling_seed for r in made.engine.requests}
        for t in group.trajectories:
            assert [turn.sampling.sampling_seed for turn in t.turns] == [asked[str(t.group_index), str(i)] for i in range(2)]
            assert {turn.sampling.max_new_tokens for turn in t.turns} == {32}
        return asked

    first = await played(0)
    assert len(set(first.values())) == 4 and all(0 <= seed < 2**31 for seed in first.values())
    assert await played(0) == first
    assert (await played(1) == first) is (own is not None)
    assert set((await played(0, task_index=1)).values()).isdisjoint(first.values())


async def test_another_attempt_is_sampled_anew(bench):
    class Picky(Count):
        def step(self, action):
            if not seeds:
                seeds.append(None)
                raise ValueError("not that one")
            return super().step(action)

    seeds = []
    trajectory, made = await only(bench, Picky, kwargs={"turns": 1}, max_retries=1)
    assert trajectory.attempts == 2
    assert len({r.sampling.sampling_seed for r in made.engine.requests}) == 2


async def test_an_engine_that_takes_no_seeds_is_not_recorded_as_if_it_had(bench):
    made = bench(Count, kwargs={"turns": 1})
    generation = made.engine._generation
    made.engine._generation = lambda *args: replace(generation(*args), seeded=False)
    (trajectory,) = (await made.group()).group.trajectories
    assert [turn.sampling.sampling_seed for turn in trajectory.turns] == [None]


async def test_close_is_called_however_the_episode_ends(bench):
    closed = []

    class Closing(Count):
        def step(self, action):
            if closed is not None and self.turns == 0:
                raise ValueError("x")
            return super().step(action)

        def close(self):
            closed.append(self)

    for turns in (0, 1):
        _, made = await only(bench, Closing, kwargs={"turns": turns})
        await until(lambda made=made: not made.worker.context.tasks)
    assert len(closed) == 2


async def test_a_close_that_fails_does_not_spoil_the_episode(bench):
    trajectory, made = await only(bench, env_with(close=raising(ValueError("stuck"))))
    await until(lambda: not made.worker.context.tasks)
    assert trajectory.status is Status.COMPLETED and made.worker.context.tally.closing == 1


class Agents:
    """Agents that go their own ways."""

    @staticmethod
    async def lazy(session):
        await session.reset()

    @staticmethod
    async def impatient(session):
        await session.generate([relax.Message("user", (relax.Text("hi"),))])

    @staticmethod
    async def early(session):
        await session.generate(await session.reset())

    @staticmethod
    async def swallows(session):
        messages = await session.reset()
        while True:
            try:
                await session.step(await session.generate(messages))
            except relax.RelaxError:
                continue

    @staticmethod
    async def buggy(session):
        await session.reset()
        raise IndexError("mine")

    @staticmethod
    async def goes_on(session):
        action = await session.generate(await session.reset())
        await session.step(action)
        await session.step(action)


@pytest.mark.parametrize(
    "agent, status, expected",
    [
        (Agents.lazy, Status.FAILED, "the agent returned without asking the policy"),
        (Agents.impatient, Status.FAILED, "call reset first"),
        (Agents.early, Status.TRUNCATED, None),
        (Agents.buggy, Status.FAILED, "agent: raised IndexError: mine"),
        (Agents.goes_on, Status.FAILED, "the agent acts though the episode is over"),
        (Agents.swallows, Status.TIMED_OUT, "episode: took longer than 0.3 s"),
    ],
)
async def test_agents_that_go_their_own_ways(bench, agent, status, expected):
    trajectory, _ = await only(bench, Count, agent=agent, episode_timeout=0.3)
    assert trajectory.status is status
    assert trajectory.error is None if expected is None else expected in trajectory.error


async def test_an_agent_that_swallows_an_error_cannot_hide_it(bench):
    async def hides(session):
        messages = await session.reset()
        action = await session.generate(messages)
        try:
            await session.step(action)
        except relax.EnvError:
            return

    trajectory, _ = await only(bench, env_with(step=raising(ValueError("x"))), agent=hides)
    assert trajectory.status is Status.FAILED and "step: raised ValueError" in trajectory.error


async def test_an_agent_that_rewrites_history_begins_a_new_training_sequence(bench):
    async def summarises(session):
        messages = await session.reset()
        action = await session.generate(messages)
        outcome = await session.step(action)
        await session.generate([relax.Message("user", (relax.Text("in short"),)), *outcome.observation])

    trajectory, _ = await only(bench, Count, agent=summarises, kwargs={"turns": 3})
    samples = trajectory.samples()
    assert len(trajectory.turns) == len(samples) == 2
    assert [m["content"] for m in trajectory.messages] == ["in short", "turn 1", "A"]


async def test_the_environment_of_a_gymnasium_wrapper_is_refused_by_name(bench):
    class Plain(gymnasium.Env):
        metadata: ClassVar[dict] = {}

    with pytest.raises(relax.RegistryError, match=r"not a subclass of relax_sdk\.Env"):
        bench(Plain)


class Letters(Count):
    """Pays for the length of the text."""

    def __init__(self) -> None:
        super().__init__(turns=2)
        self.told: list[Any] = []

    def step(self, action):
        self.told += [f"{token.token} at {token.at}" for token in action.control_tokens]
        observation, _, *ends, info = super().step(action)
        return observation, float(len(action.text)), *ends, info | {"told": self.told}


@pytest.mark.parametrize("dropped", [False, True])
async def test_tokens_that_are_no_text_earn_nothing_and_are_told(bench, dropped):
    """Also where an agent gives back its messages as plain OpenAI messages, which know no control tokens."""

    async def agent(session):
        messages = await session.reset()
        while True:
            action = await session.generate(messages)
            outcome = await session.step(action)
            if outcome.done:
                return
            sent = action.to_openai()
            if dropped:
                del sent["control_tokens"]
            messages += [relax.Message.from_openai(sent), *outcome.observation]

    trajectory, _ = await only(bench, Letters, "ab" + "</tool_call>" * 6, agent=agent)
    assert trajectory.status is Status.COMPLETED and trajectory.reward == 4.0
    assert trajectory.info["told"] == ["</tool_call> at 2"] * 12
    assert [m["content"] for m in trajectory.messages if m["role"] == "assistant"] == ["ab", "ab"]
    assert len(trajectory.samples()) == 1, "the recorded tokens are gone on from"
