"""What a batch says of its episodes."""

from __future__ import annotations

from relax_server.roles.batch_figures import batch_figures, sample_answers, shown

from relax_sdk.media import MediaRef
from relax_sdk.trajectory import Group, Status, Trajectory, Turn


def trajectory(reward: float, finish: str = "stop", status: Status = Status.COMPLETED) -> Trajectory:
    """An episode of one turn about a sound."""
    asked = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}, {"type": "text", "text": "A or B?"}]}
    answer = {"role": "assistant", "content": f"B{reward:g}"}
    turn = Turn([1], [2], [0.0], finish_reason=finish)
    return Trajectory("t", "e", "0", 0, "g", 0, 2, 0, status, [turn], [asked, answer], reward)


def test_figures_of_a_batch():
    group = Group("g", "e", 0, [trajectory(0.5), trajectory(1.0, "length", Status.TRUNCATED)])
    figures = batch_figures([group], 2)
    assert figures == {
        "status": {"completed": 1, "truncated": 1},
        "reward_min": 0.5,
        "reward_max": 1.0,
        "cut_responses": 0.5,
        "unreadable_calls": 0.0,
        "rewards_std": {},
        "answer_tokens_mean": 1.0,
        "answer_tokens_max": 1,
        "turns_mean": 1.0,
        "observations": 1,
        "media_different": {},
    }
    sampled = [step for step in range(1, 31) if "samples" in batch_figures([group], step)]
    assert sampled == [1, 10, 20, 30]
    best, worst = batch_figures([group], 1)["samples"]
    assert (best["which"], best["answer"], worst["which"], worst["answer"]) == ("best", "B1", "worst", "B0.5")
    assert batch_figures([], 1)["cut_responses"] == 0.0


def test_how_far_episodes_differ_is_counted():
    sounds = [MediaRef(sha, "audio/wav", 8) for sha in ("a" * 64, "b" * 64)]
    first, second = trajectory(0.0), trajectory(1.0)
    first.rewards, second.rewards = {"right": 0.0, "short": 0.5}, {"right": 1.0, "short": 0.5}
    first.turns = [Turn([1], [2, 3, 4], [0.0] * 3, media=sounds[:1]), Turn([1, 2], [5], [0.0], media=sounds)]
    second.turns = [Turn([1], [2, 3], [0.0] * 2, media=sounds[1:])]
    figures = batch_figures([Group("g", "e", 0, [first, second])], 2)
    assert figures["rewards_std"] == {"right": 0.5, "short": 0.0}
    assert (figures["answer_tokens_mean"], figures["answer_tokens_max"], figures["turns_mean"]) == (2.0, 3, 1.5)
    assert figures["media_different"] == {"audio": 2}
    assert figures["observations"] == 2, "the same tokens, but another sound"


def test_answers_with_a_tool_call_that_cannot_be_read_are_counted():
    wrong = trajectory(0.0)
    wrong.turns = [Turn([1], [2], [0.0], unreadable_calls=n) for n in (3, 0, 1)]
    figures = batch_figures([Group("g", "e", 0, [wrong, trajectory(0.0)])], 2)
    assert figures["unreadable_calls"] == 0.5


def test_a_sample_shows_the_question_the_answer_and_the_reward():
    one = trajectory(1.0)
    one.turns[0].media = [MediaRef(sha * 64, "audio/wav", 8) for sha in "abcd"]
    assert sample_answers([one]) == [
        {
            "which": "an answer",
            "task": 0,
            "asked": "<audio> A or B?",
            "answer": "B1",
            "reward": "1.000",
            "media": [{"kind": "audio", "sha256": sha * 64} for sha in "bcd"],
        }
    ]
    equals = [trajectory(1.0) for _ in range(3)]
    for index, each in enumerate(equals):
        each.task_index = index
    assert [sample_answers(equals, turn)[0]["task"] for turn in range(4)] == [0, 1, 2, 0], "not always the same episode"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "guess", "arguments": '{"x": 1}'}}]}
    assert shown(call) == 'guess({"x": 1})'
    assert shown({"tool_calls": [{"function": {"name": "", "arguments": "{}"}}]}) == "<unreadable tool call>"
    assert len(shown({"content": "x" * 10_000})) == 201
    silent = trajectory(0.0)
    silent.messages = silent.messages[:1]
    assert sample_answers([silent]) == sample_answers([]) == []
