"""The black-box agents inside training: an environment with pictures, tools and words, played by base URL."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from black_box import AGENTS, call, words
from relax_agents.react import Action, FinalAnswer, UnreadableAnswer, describe, observed, read_answer
from relax_server.gateway.agent.gateway import AgentGateway
from relax_server.rollout.threads import CallThreads

import relax_sdk as relax
from relax_sdk import Image, MediaStore, SamplingParams, Status


def picture(value: int) -> Image:
    return Image.from_array(np.full((64, 64, 3), value, np.uint8))


class Gallery(relax.Env):
    """Two pictures are to be named; the second is seen by a tool."""

    modalities = {"image"}
    system_prompt = "Name the pictures."

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.words = []
        return ["the first:", picture(10)], {}

    @relax.tool
    def look(self) -> list:
        """See the second one."""
        return ["the second:", picture(200)]

    def step(self, action):
        self.words.append(action.text)
        over = len(self.words) == 2
        return (None if over else "and the second?"), 0.5, over, False, {"words": list(self.words)}


@pytest.mark.parametrize("agent", AGENTS)
async def test_pictures_tools_and_words_in_one_episode(bench, processor, tmp_path, agent: str) -> None:
    lines = iter([words(agent, "night"), call(agent, "look"), words(agent, "snow")])
    command = [sys.executable, "-m", f"relax_agents.{agent}"]
    gateway = AgentGateway(command, processor, MediaStore(tmp_path / "media"), CallThreads("media", 1))
    made = bench(
        Gallery,
        lambda request: next(lines),
        agent=gateway.play,
        max_retries=0,
        run_config={"sampling": SamplingParams(max_new_tokens=200)},
    )
    result = await made.group()
    await gateway.close()
    assert result.group is not None, result.error
    (trajectory,) = result.group.trajectories
    assert trajectory.status is Status.COMPLETED and trajectory.reward == 1.0
    assert trajectory.info["words"] == ["night", "snow"]
    assert [len(turn.media) for turn in trajectory.turns] == [1, 1, 2]
    assert trajectory.turns[2].media == [picture(10).ref, picture(200).ref]
    assert "Name the pictures." in processor.decode(trajectory.turns[0].prompt_ids)
    assert len(trajectory.samples()) == 1, "one training sequence"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('Thought: a\nAction: guess\nAction Input: {"number": 3}', Action("guess", {"number": 3})),
        ('Action:guess\nAction Input:\n{\n "number": 3\n}', Action("guess", {"number": 3})),
        ("Thought: nothing to give\nAction: look", Action("look", {})),
        ("  Action: look  \n  Action Input:  ", Action("look", {})),
        ("Thought: so\nFinal Answer: it is\nblue", FinalAnswer("it is\nblue")),
        ("Final Answer:", FinalAnswer("")),
        ("Action: look\nAction Input: {}\nFinal Answer: made up before it has looked", Action("look", {})),
        ("Action: one\nAction Input: {}\nAction: two\nAction Input: {}", Action("one", {})),
        ('Action: say\nAction Input: {"text": "Thought: Action: x"}', Action("say", {"text": "Thought: Action: x"})),
    ],
)
def test_what_an_answer_asks_for(text: str, meant: Action | FinalAnswer) -> None:
    assert read_answer(text) == meant


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "neither"),
        ("Thought: hm", "neither"),
        ("Action:\nAction Input: {}", "neither"),
        ("Action: guess\nAction Input: number = 3", "not JSON"),
        ("Action: guess\nAction Input: [3]", "must be a JSON object"),
        ("Action: guess\nAction Input: " + "[" * 100_000, "not JSON"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, reason: str) -> None:
    with pytest.raises(UnreadableAnswer, match=reason) as caught:
        read_answer(text)
    assert len(str(caught.value)) < 300


def test_tools_are_described_in_words() -> None:
    class Tools(relax.Env):
        @relax.tool
        def search(self, query: str, limit: int = 3, near: float | None = None) -> str:
            """Search the library."""
            return ""

        @relax.tool
        def look(self) -> str:
            return ""

    from relax_sdk.tools import tool_schemas

    assert describe(tool_schemas(Tools())).splitlines() == [
        'search(query: string, limit: integer = 3, near: {"anyOf": [{"type": "number"}, {"type": "null"}]} = null): '
        "Search the library.",
        "look(): no description",
    ]
    assert "final answer" in describe([])


def test_an_observation_keeps_its_media() -> None:
    part = {"type": "image_url", "image_url": {"url": "relax-media:00"}}
    assert observed({"role": "tool", "content": "higher"}) == {"role": "user", "content": "Observation: higher"}
    assert observed({"role": "user", "content": [part]})["content"] == [{"type": "text", "text": "Observation: "}, part]
