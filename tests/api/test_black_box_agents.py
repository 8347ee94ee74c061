"""The agents that ship as programs play episodes of a real service: with a scripted engine, and with a model that babbles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from black_box import AGENTS, call, play, words
from relax_envs.higher_lower import tasks
from relax_server.models.processor import Processor
from scripted_server import ScriptedServer
from service_process import Service, start

FIVE = next(i for i, row in enumerate(tasks()["train"]) if row["number"] == 5)
"""A task whose hidden number is 5."""
GAME = {"env": "higher-lower-8-v0", "task_index": FIVE, "sampling": {"max_new_tokens": 200}}


@pytest.fixture(scope="module")
def engine(processor: Processor) -> Iterator[ScriptedServer]:
    """A fake engine: what the policy says is scripted."""
    it = ScriptedServer(processor)
    it.start()
    yield it
    it.stop()


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory, engine: ScriptedServer) -> Iterator[Service]:
    """A real service in front of it."""
    it = start(tmp_path_factory.mktemp("scripted"), "--engine", engine.url)
    yield it
    it.stop()


def guess(agent: str, number: int) -> str:
    return call(agent, "guess", number=number)


@pytest.mark.parametrize("agent", AGENTS)
def test_an_episode_is_won_by_heeding_what_is_observed(scripted: Service, engine: ScriptedServer, agent: str) -> None:
    engine.says(guess(agent, 1), guess(agent, 8), guess(agent, 5))
    played = play(scripted, agent, **GAME)
    assert played["status"] == "completed" and played["rewards"] == {"env": 1.0}
    assert [turn["reward"] for turn in played["turns"]] == [0.0, 0.0, 1.0]
    assert "higher" not in engine.prompts[0] and "higher" in engine.prompts[1] and "lower" in engine.prompts[2]


@pytest.mark.parametrize("agent", AGENTS)
def test_the_whole_episode_is_one_training_sequence(scripted: Service, engine: ScriptedServer, agent: str) -> None:
    """Each prompt begins with the very tokens that were recorded before it."""
    engine.says(guess(agent, 1), guess(agent, 8), guess(agent, 5))
    turns = play(scripted, agent, **GAME)["turns"]
    for one, two in itertools.pairwise(turns):
        known = one["prompt_ids"] + one["response_ids"]
        assert two["prompt_ids"][: len(known)] == known


@pytest.mark.parametrize("agent", AGENTS)
def test_an_answer_in_words_is_an_action_too(scripted: Service, engine: ScriptedServer, agent: str) -> None:
    engine.says(guess(agent, 1), words(agent, "five"))
    played = play(scripted, agent, **GAME)
    assert played["status"] == "completed" and played["reward"] == 0.0 and len(played["turns"]) == 2


@pytest.mark.parametrize("agent", AGENTS)
def test_an_unknown_tool_is_told_to_the_policy(scripted: Service, engine: ScriptedServer, agent: str) -> None:
    engine.says(call(agent, "fly", to="the moon"), guess(agent, 5))
    played = play(scripted, agent, **GAME)
    assert played["status"] == "completed" and played["reward"] == 1.0
    answered = engine.prompts[1][len(engine.prompts[0]) :]
    assert "nknown tool" in answered and "guess" in answered


@pytest.mark.parametrize("agent", AGENTS)
def test_wrong_arguments_are_told_to_the_policy(scripted: Service, engine: ScriptedServer, agent: str) -> None:
    engine.says(call(agent, "guess", number="many"), guess(agent, 5))
    assert play(scripted, agent, **GAME)["reward"] == 1.0
    assert "integer" in engine.prompts[1][len(engine.prompts[0]) :]


@pytest.mark.parametrize(("agent", "ends"), [("openai_loop", 1), ("tool_calling", 1), ("react", 1), ("pydantic_ai_agent", 0)])
def test_a_limit_on_turns_truncates_the_episode(scripted: Service, engine: ScriptedServer, agent: str, ends: int) -> None:
    engine.repeats(guess(agent, 1))
    played = play(scripted, agent, ends=ends, limits={"max_turns": 2}, **GAME)
    assert played["status"] == "truncated" and len(played["turns"]) == 2 and played["error"] is None


@pytest.mark.parametrize("agent", ["openai_loop", "tool_calling", "pydantic_ai_agent"])
def test_several_calls_in_one_answer_are_carried_out_until_one_ends_it(
    scripted: Service, engine: ScriptedServer, agent: str
) -> None:
    engine.says("".join(guess(agent, number) for number in (1, 5, 7)))
    played = play(scripted, agent, **GAME)
    assert played["status"] == "completed" and played["reward"] == 1.0 and len(played["turns"]) == 1


def test_the_framework_asks_again_after_an_empty_answer(scripted: Service, engine: ScriptedServer) -> None:
    engine.says("", guess("pydantic_ai_agent", 5))
    played = play(scripted, "pydantic_ai_agent", **GAME)
    assert played["reward"] == 1.0 and len(played["turns"]) == 2
    assert len(played["turns"][0]["response_ids"]) == 1, "only the end of the turn"


@pytest.mark.parametrize("agent", AGENTS)
def test_words_before_a_call_are_no_answer(scripted: Service, engine: ScriptedServer, agent: str) -> None:
    engine.says("The middle one." + ("\n" if agent == "react" else "") + guess(agent, 5))
    played = play(scripted, agent, **GAME)
    assert played["status"] == "completed" and played["reward"] == 1.0 and len(played["turns"]) == 1


def test_react_is_told_of_the_tools_and_of_what_cannot_be_read(scripted: Service, engine: ScriptedServer) -> None:
    engine.says(
        "I guess it is five.",
        "Thought: a number\nAction: guess\nAction Input: 5",
        "Thought: an object\nAction: guess\nAction Input: {number: 5}",
        "Thought: right\nAction: guess\nAction Input: {}",
        guess("react", 5),
    )
    played = play(scripted, "react", **GAME)
    assert played["reward"] == 1.0 and len(played["turns"]) == 5
    first, *others = engine.prompts
    assert "guess(number: integer): Guess the number." in first and "Action Input:" in first
    assert "guess(number)\n" not in first, "the tools are told of once"
    told = [new[len(old) :] for old, new in zip(engine.prompts, others, strict=False)]
    assert all("<|im_start|>user\nObservation: " in text for text in told)
    for text, reason in zip(told, ("neither", "must be a JSON object", "is not JSON", "number: Field required"), strict=True):
        assert reason in text


def test_react_ends_an_answer_where_it_makes_an_observation_up(scripted: Service, engine: ScriptedServer) -> None:
    engine.says(guess("react", 1) + "\nObservation: correct\nThought: done\nFinal Answer: 1", guess("react", 5))
    played = play(scripted, "react", **GAME)
    assert played["reward"] == 1.0 and len(played["turns"]) == 2
    assert "correct" not in engine.prompts[1]


def test_react_gives_up_after_its_steps(scripted: Service, engine: ScriptedServer) -> None:
    engine.repeats("I do not know.")
    played = play(scripted, "react", "--steps", "2", **GAME)
    assert played["status"] == "truncated" and len(played["turns"]) == 2 and played["reward"] == 0.0


@pytest.mark.parametrize("agent", AGENTS)
def test_a_model_that_babbles_is_recorded(service: Service, agent: str) -> None:
    """Random weights: whatever they say, the episode ends, and every token of it is there."""
    arguments = ("--steps", "2") if agent == "react" else ()
    played = play(service, agent, *arguments, env="higher-lower-v0", sampling={"max_new_tokens": 8}, limits={"max_turns": 4})
    assert played["status"] in ("completed", "truncated") and 1 <= len(played["turns"]) <= 4
    assert all(len(turn["response_ids"]) == len(turn["response_logprobs"]) > 0 for turn in played["turns"])
