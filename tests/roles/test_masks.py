"""An episode of a run token by token, through the SDK and on the command line."""

from __future__ import annotations

import numpy as np
from recorded_run import bench, processor, recorded_run  # noqa: F401
from relax_server.journal import open_journal
from relax_server.journal.trained import TrainedGroup, TrainedSample, TrainedTrajectory
from typer.testing import CliRunner

from relax_sdk import cli, explain_mask
from relax_sdk.mask import ExplainedToken, MaskExplanation


async def test_an_episode_of_two_turns(recorded_run, processor):  # noqa: F811
    run = await recorded_run()
    (longest,) = run.trajectories(split="train", sort="longest", limit=1)
    tokens = len(longest.turns[0].response_ids), len(longest.turns[1].response_ids)
    advantages = np.repeat(np.array([-1.5, 0.0], np.float32), tokens)
    record = TrainedSample(np.zeros_like(advantages), np.zeros_like(advantages), advantages)
    journal = open_journal(run.folder / "journal.db")
    journal.record_trained("run", [TrainedGroup(longest.group_id, 9, 8, [TrainedTrajectory(longest.id, 0.0, 0.0, [record])])])
    journal.close()

    found = explain_mask(run.folder, longest.id)
    (sample,) = found.samples
    assert "".join(t.text for t in sample if t.mask) == processor.decode(
        [id for turn in longest.turns for id in turn.response_ids]
    )
    assert [t.id for t in sample] == [*longest.turns[1].prompt_ids, *longest.turns[1].response_ids]
    assert [line.why for line in found.lines(0) if line.why] == [
        "not trained: prompt",
        "answer of turn 0: trained in step 9 with advantage -1.5",
        "not trained: what came after the answer of turn 0, such as its observation",
        "answer of turn 1: trained in step 9 with advantage +0, so that the reward moves nothing",
    ]
    assert sum(line.count for line in found.lines(0)) == len(sample)

    cli.add_commands()
    done = CliRunner().invoke(cli.app, ["explain-mask", str(run.folder), longest.id.removeprefix("run/")])
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in done.output.splitlines()] == str(found).splitlines()


def test_runs_of_what_was_given_are_one_line_and_answers_never():
    tokens = [ExplainedToken(i, 5, "<|audio_pad|>", 0, "prompt") for i in range(120)]
    tokens += [ExplainedToken(120 + i, 7, "\x1b", 1, "answer", -0.25, 3) for i in range(5)]
    lines = str(MaskExplanation("run/train/0/0", (tuple(tokens),))).splitlines()
    assert lines[0].endswith("1 training sequence, 125 tokens, 5 of them written by the policy (mask 1)")
    assert lines[1].split() == ["0–119", "0", "5", "'<|audio_pad|>'", "×120", "←", "prompt"]
    assert len(lines) == 7 and "\x1b" not in "".join(lines) and lines[3].endswith("logprob -0.250, version 3")
