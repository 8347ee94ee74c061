"""Alternating or overlapping: the time of a step where tools take 200 ms and episodes differ in length.

    python -m benchmarks.overlap [--times 5] [--steps 24]

Every action waits 0.2 s before the environment answers, as with a tool that asks another machine; that costs no processor time
here. `higher-lower-v0` and `omni-quiz-v0` have episodes of equal length; `long-tail` is text, with a geometric number of turns
(two on average, twelve at most) and answers of up to 24 tokens. With `mode="colocate"` a batch is generated, to the end of its
longest episode, and then trained on; with `mode="async"` and a staleness of 1 the next batch is played meanwhile.
*Efficiency* is the longer of the two halves, as colocate has them, over the asynchronous step: above 1 where two batches in
flight fill each other's waits. The modes alternate; figures are medians over the repetitions, the range is of colocate / async.

Two batches are in flight with a staleness of 1, each until its weights are out, so a step takes at least half of what playing
and training one batch take, and the ratio is about 2 at most where all episodes have as many turns; what switching costs
`colocate` comes on top. What is missing to 2 is what the halves take from each other's processors. The cases *engine set to
1 s a call* show it: every model call takes a second more, which costs no processor time, as with an engine on a device of its
own.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Any

import relax_sdk as relax
from benchmarks.report import save
from benchmarks.step import middle, train
from relax_sdk.env import ResetResult, StepResult
from relax_sdk.messages import AssistantMessage
from relax_sdk.session import Session

LATENCY = 0.2
"""Seconds that a tool takes."""
CALL = 1.0
"""Seconds that a call takes of an engine whose speed is set, besides its own."""
LONGEST = 12
AIMS = {"text": 1.76, "omni": 2.0}
"""The ratio of colocate to async in the paper."""


async def slow_tools(session: Session) -> None:
    """The built-in loops, with a wait before every answer of the environment."""
    await play(session, LATENCY)


async def slow_engine(session: Session) -> None:
    """The built-in loops, with a wait after every model call."""
    await play(session, CALL)


async def play(session: Session, seconds: float) -> None:
    """One episode with a wait in every turn."""
    messages = await session.reset()
    while not session.done:
        answer = await session.generate(messages)
        await asyncio.sleep(seconds)
        outcome = await (session.call_tools(answer) if answer.tool_calls else session.step(answer))
        messages = [*messages, answer, *outcome.observation]


class LongTail(relax.Env):
    """A conversation of geometrically many turns; the reward is the share of one letter, only to have one."""

    blocking = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        self.left = min(LONGEST, int(self.np_random.geometric(0.5)))
        return f"tell {self.left}", {}

    def step(self, action: AssistantMessage) -> StepResult:
        self.left -= 1
        return "go on", action.text.count("e") / max(len(action.text), 1), self.left == 0, False, {}


LONG_TAIL = {"sampling": {"max_new_tokens": 24}, "rollout": {"groups_per_step": 8, "group_size": 8, "max_turns": LONGEST}}
CASES: dict[str, tuple[str, Any, Any, dict[str, Any]]] = {
    "higher-lower-v0, 200 ms": ("text", "higher-lower-v0", slow_tools, {}),
    "long-tail, 200 ms": ("text", LongTail, slow_tools, LONG_TAIL),
    "omni-quiz-v0, 200 ms": ("omni", "omni-quiz-v0", slow_tools, {}),
    "higher-lower-v0, engine set to 1 s a call": ("text", "higher-lower-v0", slow_engine, {}),
    "omni-quiz-v0, engine set to 1 s a call": ("omni", "omni-quiz-v0", slow_engine, {}),
}


def one(case: str, steps: int, seed: int) -> dict[str, float | None]:
    """Both modes, once."""
    _, env, agent, settings = CASES[case]
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        turns = train(env, "colocate", steps, seed, root / "colocate", agent=agent, **settings)
        both = train(env, "async", steps, seed, root / "async", agent=agent, **settings)
    learn = turns["train"] + turns["publish"]
    return {
        "generate": turns["wait"],
        "train": learn,
        "colocate step": turns["step"],
        "async step": both["step"],
        "of it wait": both["wait"] / both["step"],
        "efficiency": max(turns["wait"], learn) / both["step"],
        "colocate / async": turns["step"] / both["step"],
        "samples/s, colocate": turns["n"] / turns["step"],
        "samples/s, async": both["n"] / both["step"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in args.cases:
        seen = []
        for seed in range(args.times):
            seen.append(one(case, args.steps, seed))
            print(f"{case}, repetition {seed + 1} of {args.times}: {seen[-1]}", flush=True)
        row = {"case": case, "times": args.times} | {key: middle([s[key] for s in seen]) for key in seen[0]}
        spread = [f"{pick(s['colocate / async'] for s in seen):.2f}" for pick in (min, max)]
        rows.append(row | {"range": " … ".join(spread), "aim": AIMS[CASES[case][0]]})
        save("overlap", rows, key="case", bars={"colocate / async": AIMS})


if __name__ == "__main__":
    main()
