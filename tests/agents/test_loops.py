"""The built-in agents in real episodes: chat, tools, and what a policy may get wrong."""

import asyncio

import numpy as np
import pytest
from relax_agents import chat_loop, tool_loop
from relax_server.rollout.context import default_agent

import relax_sdk as relax
from relax_sdk import Image, Status, ToolResult


class Guess(relax.Env):
    """A number from 1 to 8 is to be found with a tool."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = []
        return "1-8?", {}

    @relax.tool
    def guess(self, number: int) -> ToolResult:
        """Guess."""
        if number == 5:
            return ToolResult("correct", reward=1.0, terminated=True)
        return ToolResult("higher" if number < 5 else "lower", reward=0.125)

    @relax.tool
    async def look(self) -> list:
        """Show it."""
        await asyncio.sleep(0)
        return ["see", Image.from_array(np.zeros((64, 64, 3), np.uint8))]

    @relax.tool
    def broken(self) -> str:
        """Fail."""
        raise OSError("wire cut")

    @relax.tool
    def odd(self) -> float:
        """Return what cannot be shown."""
        return 3.5

    @relax.tool
    def infinite(self) -> ToolResult:
        """Pay too much."""
        return ToolResult("rich", reward=float("inf"))

    def step(self, action):
        return f"you said {action.text}", 0.25, action.text == "bye", False, {}


FLY = '<tool_call>{"name": "fly", "arguments": {}}</tool_call>'


class Script:
    """Says its lines one after another."""

    def __init__(self, *lines):
        self.lines = iter(lines)

    def __call__(self, request):
        return next(self.lines)


async def play(bench, *lines, env=Guess, **options):
    made = bench(
        env, Script(*lines), max_retries=0, run_config={"sampling": relax.SamplingParams(max_new_tokens=128)}, **options
    )
    return (await made.group()).trajectories[0], made


def shown(trajectory):
    return [(m["role"], m["content"]) for m in trajectory.messages]


async def test_tool_calls_go_to_the_tools_and_their_answers_to_the_policy(bench):
    trajectory, made = await play(bench, "<tool_call>guess(2)</tool_call>", "<tool_call>guess(5)</tool_call>")
    assert trajectory.status is Status.COMPLETED, trajectory.error
    assert trajectory.reward == 1.125 and [t.reward for t in trajectory.turns] == [0.125, 1.0]
    assert shown(trajectory)[-3:] == [("tool", "higher"), ("assistant", ""), ("tool", "correct")]
    calls = trajectory.messages[1]["tool_calls"]
    assert calls[0]["function"] == {"name": "guess", "arguments": '{"number": 2}'}
    assert trajectory.messages[2]["tool_call_id"] == calls[0]["id"]
    assert len(trajectory.samples()) == 1
    assert "guess(number)" in made.worker.processor.decode(trajectory.turns[0].prompt_ids), "the policy is told of the tools"


async def test_an_action_without_tool_calls_is_a_step(bench):
    trajectory, _ = await play(bench, "hello", "<tool_call>guess(7)</tool_call>", "bye")
    assert trajectory.status is Status.COMPLETED and trajectory.reward == 0.625
    assert shown(trajectory)[2] == ("user", "you said hello") and shown(trajectory)[4] == ("tool", "lower")


async def test_several_calls_in_one_action_are_answered_in_order_until_one_ends_it(bench):
    calls = "".join(f"<tool_call>guess({n})</tool_call>" for n in (1, 8, 5, 2))
    trajectory, _ = await play(bench, calls)
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["higher", "lower", "correct"]
    assert trajectory.reward == 1.25 and trajectory.status is Status.COMPLETED


@pytest.mark.parametrize(
    "line, answer",
    [
        ("<tool_call>guess(", "guess"),
        ("<tool_call>guess(two)</tool_call>", ""),
        ('<tool_call>{"name": "guess", "arguments": {"number": "x"}}</tool_call>', "guess: number:"),
        ('<tool_call>{"name": "guess", "arguments": {"n": 1}}</tool_call>', "guess: number: Field required"),
        (
            '<tool_call>{"name": "fly", "arguments": {}}</tool_call>',
            "unknown tool 'fly'; there are: guess, look, broken, odd, infinite",
        ),
        ("<tool_call></tool_call>", ""),
    ],
)
async def test_a_malformed_call_is_answered_to_the_policy_as_text(bench, line, answer):
    trajectory, _ = await play(bench, line, "<tool_call>guess(5)</tool_call>")
    assert trajectory.status is Status.COMPLETED, trajectory.error
    first = trajectory.messages[2]
    assert first["role"] == "tool" and first["content"] and answer in first["content"]
    assert trajectory.reward == 1.0 and len(trajectory.turns) == 2


async def test_a_tool_may_show_media(bench):
    trajectory, made = await play(bench, "<tool_call>look()</tool_call>", "bye")
    assert trajectory.status is Status.COMPLETED, trajectory.error
    assert [m.kind for m in trajectory.turns[1].media] == ["image"] and made.store.get(trajectory.turns[1].media[0])


@pytest.mark.parametrize(
    "line, expected",
    [
        ("<tool_call>broken()</tool_call>", "turn 1, call_tools: raised OSError: wire cut (test_loops.py:"),
        ("<tool_call>odd()</tool_call>", "turn 1, call_tools: an observation must be"),
        ("<tool_call>infinite()</tool_call>", "turn 1, call_tools: the reward of the tools is inf"),
    ],
)
async def test_what_a_tool_gets_wrong_is_the_environments_error(bench, line, expected):
    trajectory, made = await play(bench, line)
    assert trajectory.status is Status.FAILED and expected in trajectory.error
    assert made.worker.stats().failures == {"EnvError": 1}


async def test_a_tool_that_hangs_times_out(bench):
    class Waits(Guess):
        @relax.tool
        async def guess(self, number: int) -> str:
            """Guess."""
            await asyncio.Event().wait()
            return ""

    trajectory, _ = await play(bench, "<tool_call>guess(5)</tool_call>", env=Waits, step_timeout=0.05)
    assert trajectory.status is Status.TIMED_OUT and "call_tools: took longer than 0.05 s" in trajectory.error


async def test_a_policy_that_never_ends_is_truncated(bench):
    trajectory, _ = await play(bench, *["<tool_call>guess(1)</tool_call>"] * 9, max_turns=3)
    assert trajectory.status is Status.TRUNCATED and len(trajectory.turns) == 3 and trajectory.reward == 0.375


async def test_the_chat_loop_leaves_tool_calls_to_the_environment(bench):
    class Reads(relax.Env):
        def reset(self, *, seed=None, options=None):
            return "go", {}

        def step(self, action):
            self.calls = [call.name for call in action.tool_calls]
            return None, 1.0, True, False, {"calls": self.calls}

    trajectory, _ = await play(bench, '<tool_call>{"name": "guess", "arguments": {}}</tool_call>', env=Reads)
    assert trajectory.status is Status.COMPLETED and trajectory.info == {"calls": ["guess"]}


def test_the_default_agent_is_the_tool_loop_where_there_are_tools():
    assert default_agent(Guess) is tool_loop

    class Plain(relax.Env):
        pass

    class Inherits(Guess):
        pass

    assert default_agent(Plain) is chat_loop and default_agent(Inherits) is tool_loop


async def test_higher_lower_of_the_package_is_won_by_halving(bench):
    spec = relax.get_spec("higher-lower-v0")

    class Halving:
        """Reads the last answer off the prompt, as a good policy would."""

        low, high = 1, 8

        def __call__(self, request):
            text = made.worker.processor.decode(request.input_ids)
            last = text.rsplit("<|im_start|>tool\n", 1)[-1] if "<|im_start|>tool" in text else ""
            if last.startswith("higher"):
                self.low = self.guess + 1
            elif last.startswith("lower"):
                self.high = self.guess - 1
            else:
                self.low, self.high = 1, 8
            self.guess = (self.low + self.high) // 2
            return f"<tool_call>guess({self.guess})</tool_call>"

    made = bench(spec.load(), Halving(), tasks=spec.tasks, max_retries=0)
    rewards = [(await made.group(i, {"number": i + 1})).trajectories[0].reward for i in range(8)]
    assert sum(rewards) == 7.0
