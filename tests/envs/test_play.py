"""The shipped environments, played: rewards, turns, and what a random and a perfect policy get."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from relax_envs.higher_lower import GUESSES, NUMBERS, HigherLowerEnv

import relax_sdk as relax
from relax_sdk.messages import AssistantMessage, Text, ToolCall, as_messages
from relax_sdk.tools import call_tools, tool_schemas

CHOICES = {"tone": ("audio", "which tone?", 4), "colour": ("image", "which colour?", 4)}
CHOICES |= dict.fromkeys(["motion", "motion-shuffled"], ("video", "left or right?", 2))


def say(text: str) -> AssistantMessage:
    return AssistantMessage(content=(Text(text),))


@pytest.mark.parametrize("name", CHOICES)
def test_one_look_one_letter(name: str, first_rows: Any) -> None:
    column, question, choices = CHOICES[name]
    env = relax.get_spec(f"{name}-v0").make()
    assert env.modalities == {column} and env.version and not env.blocking
    for row in first_rows(name, 8, "eval"):
        for letter in "ABCD"[:choices]:
            shown, info = env.reset(seed=0, options={"task": row})  # type: ignore[misc]
            (message,) = as_messages(shown)
            assert message.media == (row[column],) and message.text == question and info == {}
            assert env.step(say(letter)) == (None, float(letter == row["answer"]), True, False, {"answer": row["answer"]})


@pytest.mark.parametrize(
    ("text", "reward"), [("{}", 1.0), (" {}\n", 1.0), ("{}.", 0.0), ("{}{}", 0.0), ("", 0.0), ("ABCD", 0.0)]
)
def test_exactly_the_letter_counts(text: str, reward: float, first_rows: Any) -> None:
    env, row = relax.get_spec("tone-v0").make(), first_rows("tone", 1)[0]
    env.reset(options={"task": row})
    assert env.step(say(text.replace("{}", row["answer"])))[1] == reward  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "chance"), [("tone", 1 / 4), ("colour", 1 / 4), ("motion", 1 / 2), ("motion-shuffled", 1 / 2)]
)
def test_format_examples_know_nothing(name: str, chance: float, first_rows: Any) -> None:
    """They are drawn without looking at the task: every letter, equally often, whatever the answer."""
    env, rng = relax.get_spec(f"{name}-v0").make(), np.random.default_rng(0)
    drawn: dict[str, Counter[str]] = {}
    for row in first_rows(name, 16):
        env.reset(options={"task": row})
        for _ in range(100):
            drawn.setdefault(row["answer"], Counter())[env.format_example(rng).text] += 1  # type: ignore[union-attr]
    for answer, letters in drawn.items():
        n = sum(letters.values())
        assert len(letters) == 1 / chance and answer in letters
        assert all(abs(k / n - chance) < 4 * (chance * (1 - chance) / n) ** 0.5 for k in letters.values())


@pytest.mark.parametrize("name", ["tone", "omni-quiz", "higher-lower"])
def test_without_a_task_a_training_row_is_drawn_by_the_seed(name: str) -> None:
    env = relax.get_spec(f"{name}-v0").make()
    assert env.reset(seed=5) == env.reset(seed=5)
    if name == "tone":
        assert env.reset(seed=5) != env.reset(seed=6)


@pytest.mark.parametrize("name", ["tone", "colour", "motion", "omni-quiz"])
def test_an_answer_with_control_tokens_in_it_is_not_the_answer(name: str) -> None:
    env = relax.get_spec(f"{name}-v0").make()
    for control, reward in ((), True), ((relax.ControlToken("</tool_call>", 1),), False):
        env.reset(seed=5)
        right = env._task["answer"][0] if name == "omni-quiz" else env._answer  # type: ignore[attr-defined]
        action = relax.AssistantMessage(content=(relax.Text(right),), control_tokens=control)
        assert bool(env.step(action)[1]) is reward  # type: ignore[index]


# ------------------------------------------------------------------------------------------------------------ omni-quiz


@pytest.mark.parametrize("right", list(itertools.product([True, False], repeat=3)))
def test_three_questions_whatever_the_answers(right: tuple[bool, ...], first_rows: Any) -> None:
    env, row = relax.get_spec("omni-quiz-v0").make(), first_rows("omni-quiz", 1)[0]
    shown, _ = env.reset(options={"task": row})  # type: ignore[misc]
    total = 0.0
    for turn, (column, question) in enumerate(
        [("audio", "which tone?"), ("image", "which colour?"), ("video", "left or right?")]
    ):
        (message,) = as_messages(shown)
        assert message.media == (row[column],) and message.text == question
        answer = row["answer"][turn]
        shown, reward, terminated, truncated, info = env.step(say(answer if right[turn] else "Z"))  # type: ignore[misc]
        assert reward == (1 / 3 if right[turn] else 0.0) and not truncated
        assert info == ({"answer": row["answer"]} if terminated else {})
        assert terminated == (turn == 2)
        total += reward
    assert shown is None and total == pytest.approx(sum(right) / 3)


def test_the_quiz_asks_what_the_single_environments_ask(first_rows: Any) -> None:
    """The same sounds, pictures and clips: what one learns there counts here."""
    row = first_rows("omni-quiz", 1)[0]
    for name, answer in zip(["tone", "colour", "motion"], row["answer"], strict=True):
        column = CHOICES[name][0]
        single, quiz = [part.ref for part in (first_rows(name, 1)[0][column], row[column])]
        assert replace(single, sha256="", size=0) == replace(quiz, sha256="", size=0)
        env = relax.get_spec(f"{name}-v0").make()
        env.reset(options={"task": {column: row[column], "answer": answer}})
        assert env.step(say(answer))[1] == 1.0  # type: ignore[index]


def test_format_examples_of_the_quiz_fit_the_turn(first_rows: Any) -> None:
    env, rng, seen = relax.get_spec("omni-quiz-v0").make(), np.random.default_rng(0), [set(), set(), set()]
    for _ in range(60):
        env.reset(options={"task": first_rows("omni-quiz", 1)[0]})
        for letters in seen:
            action = env.format_example(rng)
            letters.add(action.text)  # type: ignore[union-attr]
            env.step(action)  # type: ignore[arg-type]
    assert seen == [set("ABCD"), set("ABCD"), set("AB")]


# --------------------------------------------------------------------------------------------------------- higher-lower


def guess(*numbers: Any) -> AssistantMessage:
    return AssistantMessage(tool_calls=tuple(ToolCall(f"call_{i}", "guess", {"number": n}) for i, n in enumerate(numbers)))


def begin(number: int) -> HigherLowerEnv:
    env = HigherLowerEnv()
    assert env.reset(options={"task": {"number": number}}) == ("1-8?", {})
    return env


async def act(env: HigherLowerEnv, *numbers: Any) -> tuple[list[str], float, bool]:
    messages, reward, terminated, truncated = await call_tools(env, guess(*numbers))
    assert not truncated
    return [m.text for m in messages], reward, terminated


async def play(number: int, policy: Any) -> float:
    """The reward of `policy(answers so far) -> guess`."""
    env, answers = begin(number), []
    for _ in range(GUESSES):
        texts, reward, terminated = await act(env, policy(answers))
        answers += texts
        if terminated:
            return reward
    raise AssertionError("three guesses must end the episode")


async def test_answers_of_the_tool() -> None:
    env = begin(5)
    assert await act(env, 2) == (["higher"], 0.0, False)
    assert await act(env, 8) == (["lower"], 0.0, False)
    assert await act(env, 5) == (["correct"], 1.0, True)
    env = begin(5)
    await act(env, 1), await act(env, 2)
    assert await act(env, 3) == (["higher"], 0.0, True), "the third wrong guess ends it"


async def test_several_guesses_in_one_action_count_each() -> None:
    assert await act(begin(5), 1, 2, 3, 5) == (["higher"] * 3, 0.0, True)
    assert await act(begin(5), 1, 5, 2) == (["higher", "correct"], 1.0, True)


async def test_numbers_out_of_range_are_guesses_too() -> None:
    env = begin(5)
    assert await act(env, 100) == (["lower"], 0.0, False)
    assert await act(env, -1) == (["higher"], 0.0, False)
    assert (await act(env, 10**30))[2]


@pytest.mark.parametrize("value", ["many", None, 2.5, [1]])
async def test_what_is_no_number_costs_no_guess(value: Any) -> None:
    env = begin(5)
    for _ in range(GUESSES + 1):
        (text,), reward, terminated = await act(env, value)
        assert text.startswith("guess: number: ") and (reward, terminated) == (0.0, False)
    assert await act(env, 5) == (["correct"], 1.0, True)


def test_an_action_without_a_call_ends_with_nothing() -> None:
    assert begin(5).step(say("5")) == (None, 0.0, True, False, {})


async def test_random_guesses_find_one_in_three() -> None:
    """All 8 numbers times all 8 ** 3 ways to guess: exactly 1 - (7/8) ** 3."""
    won = 0
    for number in range(1, NUMBERS + 1):
        for guesses in itertools.product(range(1, NUMBERS + 1), repeat=GUESSES):
            # Played with plain calls of the tool: 4,096 episodes.
            env = begin(number)
            for one in guesses:
                result = env.guess(one)
                if result.terminated:
                    break
            assert result.terminated
            won += result.reward == 1.0
    assert won / (NUMBERS * NUMBERS**GUESSES) == 1 - (7 / 8) ** 3


async def test_binary_search_finds_seven_of_eight() -> None:
    def search(answers: list[str]) -> int:
        low, high = 1, NUMBERS
        for answer in answers:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if answer == "higher" else (low, middle - 1)
        return (low + high) // 2

    rewards = [await play(number, search) for number in range(1, NUMBERS + 1)]
    assert sum(rewards) == 7.0


def test_no_policy_does_better() -> None:
    """Three guesses with two informative answers between them name at most 1 + 2 + 4 numbers."""

    def best(candidates: tuple[int, ...], left: int) -> int:
        if not left or not candidates:
            return 0
        return max(
            (g in candidates)
            + best(tuple(c for c in candidates if c < g), left - 1)
            + best(tuple(c for c in candidates if c > g), left - 1)
            for g in candidates
        )

    assert best(tuple(range(1, NUMBERS + 1)), GUESSES) == 7


def test_the_schema_is_short() -> None:
    (schema,) = tool_schemas(HigherLowerEnv())
    assert schema["function"] == {
        "name": "guess",
        "description": "Guess the number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
            "additionalProperties": False,
        },
    }


def test_format_examples_are_guesses_of_every_number() -> None:
    rng = np.random.default_rng(0)
    numbers = Counter(begin(5).format_example(rng).tool_calls[0].arguments["number"] for _ in range(400))
    assert sorted(numbers) == list(range(1, 9)) and max(numbers.values()) < 85
