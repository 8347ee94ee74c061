"""What a batch says of its episodes, and how a sample answer gets into TensorBoard."""

from __future__ import annotations

from pathlib import Path

from relax_server.roles.batch_figures import batch_figures, sample_answer, shown
from relax_server.roles.layout import RunLayout
from relax_server.roles.outputs import Outputs

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
    }
    sampled = [step for step in range(1, 31) if "sample" in batch_figures([group], step)]
    assert sampled == [1, 10, 20, 30]
    answers = {batch_figures([group], step)["sample"]["answer"] for step in sampled}
    assert answers == {"B0.5", "B1"}, "not always the same episode"
    assert batch_figures([], 1)["cut_responses"] == 0.0


def test_answers_with_a_tool_call_that_cannot_be_read_are_counted():
    wrong = trajectory(0.0)
    wrong.turns = [Turn([1], [2], [0.0], unreadable_calls=n) for n in (3, 0, 1)]
    figures = batch_figures([Group("g", "e", 0, [wrong, trajectory(0.0)])], 2)
    assert figures["unreadable_calls"] == 0.5


def test_a_sample_shows_the_question_the_answer_and_the_reward():
    assert sample_answer(trajectory(1.0)) == {"asked": "<audio> A or B?", "answer": "B1", "reward": "1.000"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "guess", "arguments": '{"x": 1}'}}]}
    assert shown(call) == 'guess({"x": 1})'
    assert shown({"tool_calls": [{"function": {"name": "", "arguments": "{}"}}]}) == "<unreadable tool call>"
    assert len(shown({"content": "x" * 10_000})) == 201
    silent = trajectory(0.0)
    silent.messages = silent.messages[:1]
    assert sample_answer(silent) is None


def test_tensorboard_shows_the_sample(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outputs = Outputs(RunLayout(tmp_path))
    outputs.write({"step": 1, "reward": 0.5, "sample": {"asked": "A or B?", "answer": "`B`", "reward": "0.500"}})
    outputs.close()
    events = EventAccumulator(str(RunLayout(tmp_path).tensorboard)).Reload()
    (event,) = events.Tensors("sample/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "reward 0.500" in text and "A or B?" in text and "'B'" in text
    assert events.SummaryMetadata("sample/text_summary").plugin_data.plugin_name == "text"
