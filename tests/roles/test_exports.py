"""Recorded episodes written for other tools hold what was recorded, media included, and are read by these tools."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
from recorded_run import Bells, bench, processor, recorded_run  # noqa: F401
from relax_server.journal import open_journal
from sample_groups import make_group
from typer.testing import CliRunner

from relax_sdk import ConfigError, MediaStore, Run, RunConfig, TrajectoryFilter, Video, cli, export_trajectories


def load(folder, *media):
    """The splits of an exported folder, media as bytes."""
    found = datasets.load_dataset(str(folder), cache_dir=str(folder.parent / "cache"))
    plain = {"image": datasets.Image, "audio": datasets.Audio, "video": datasets.Video}
    for name in media:
        kind = plain[name.rpartition("_")[2].removesuffix("s")](decode=False)
        found = found.cast_column(name, datasets.List(kind) if name.endswith("s") else kind)
    return found


def shown(run: Run, id: str) -> list[bytes]:
    """The bytes of all media of an episode, in order."""
    (t,) = [t for t in run.trajectories(limit=None) if t.id == id]
    return [MediaStore(t.media_folder).get(ref) for ref in t.turns[-1].media]


async def test_whole_episodes_with_media_that_are_played(recorded_run, tmp_path):  # noqa: F811
    run = await recorded_run()
    done = export_trajectories(run.folder, tmp_path / "out")
    assert done.rows == {"train": 8, "eval": 1} and not done.skipped and not list(tmp_path.glob(".*"))
    found = load(tmp_path / "out", "image", "audio")
    recorded = {t.id: t for t in run.trajectories(limit=None)}
    assert {name: len(split) for name, split in found.items()} == {"train": 8, "eval": 1}
    for row in [*found["train"], *found["eval"]]:
        t = recorded[row["id"]]
        assert (row["reward"], row["tokens"], json.loads(row["rewards"])) == (t.reward, t.n_response_tokens, t.rewards)
        media = [row[name]["bytes"] for name in ("image", "audio") if row[name]]
        assert media == shown(run, t.id)
        kinds = Counter(part["type"] for message in row["messages"] for part in message["content"])
        assert kinds["image"] == 1 and kinds["audio"] == len(media) - 1
        assert row["messages"][0]["content"] == [{"type": "text", "text": "Listen."}]
    rang = next(row for row in found["train"] if row["audio"])
    call = rang["messages"][2]["tool_calls"][0]
    assert (
        call["function"] == {"name": "ring", "arguments": '{"times": 2}'} and rang["messages"][3]["tool_call_id"] == call["id"]
    )
    features = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))["train"].features
    assert isinstance(features["image"], datasets.Image) and isinstance(features["audio"], datasets.Audio)


async def test_conversations_to_imitate(recorded_run, tmp_path):  # noqa: F811
    run = await recorded_run()
    best = TrajectoryFilter(split="train", reward=(1.0, None), sort="best")
    export_trajectories(run.folder, tmp_path / "out", "sft", wanted=best, env=Bells)
    found = load(tmp_path / "out", "images")["train"]
    assert [row["reward"] for row in found] == [1.0, 1.0]
    for row in found:
        assert [message["role"] for message in row["messages"]] == ["system", "user", "assistant"]
        assert [item["bytes"] for item in row["images"]] == shown(run, row["id"])
        assert json.loads(row["tools"])[0]["function"]["name"] == "ring"


async def test_pairs_of_a_group(recorded_run, tmp_path):  # noqa: F811
    run = await recorded_run()
    done = export_trajectories(run.folder, tmp_path / "out", "preferences", margin=1.0, pairs=9, env=Bells)
    # rewards of a group: 1, 0, -0.5, -3.75
    assert done.rows == {"train": 8} and done.skipped == {"groups without two episodes whose rewards are far enough apart": 1}
    found = load(tmp_path / "out", "images", "rejected_audios")["train"]
    pairs = Counter((row["chosen_reward"], row["rejected_reward"]) for row in found)
    assert pairs == {(1.0, -3.75): 2, (0.0, -3.75): 2, (-0.5, -3.75): 2, (1.0, -0.5): 2}
    for row in found:
        assert row["chosen_id"].startswith(row["group_id"]) and row["rejected_id"].startswith(row["group_id"])
        assert [m["role"] for m in row["prompt"]] == ["system", "user"] and row["chosen"][0]["role"] == "assistant"
        assert [item["bytes"] for item in row["images"]] == shown(run, row["chosen_id"])[:1]
        assert len(row["rejected_audios"]) == (row["rejected_reward"] == -3.75)
    one = export_trajectories(run.folder, tmp_path / "one", "preferences", env=Bells)
    assert one.rows == {"train": 2}
    assert {row["rejected_reward"] for row in load(tmp_path / "one", "images", "rejected_audios")["train"]} == {-3.75}


async def test_tokens_as_they_were_sampled(recorded_run, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr("relax_sdk.progress.TICK", 0.001)
    run = await recorded_run()
    export_trajectories(run.folder, tmp_path / "out", "tokens", wanted=TrajectoryFilter(split="train", limit=None))
    assert f"writing the episodes of {run.folder.name} · " in capsys.readouterr().err
    export_trajectories(run.folder, tmp_path / "silent", "tokens", progress=False)
    assert "writing the episodes" not in capsys.readouterr().err
    recorded = {t.id: t for t in run.trajectories(limit=None)}
    for row in load(tmp_path / "out", "images", "audios")["train"]:
        (sample,) = recorded[row["id"]].samples()
        for name in ("ids", "loss_mask", "versions", "turn"):
            assert row[name] == getattr(sample, name)
        assert row["logprobs"] == pytest.approx(sample.logprobs)
        assert [item["bytes"] for item in [*row["images"], *row["audios"]]] == shown(run, row["id"])


async def test_sequences_with_films_say_how_fast_they_were_shown(recorded_run, tmp_path):  # noqa: F811
    class Films(Bells):
        modalities = {"image", "video", "audio"}

        def reset(self, *, seed=None, options=None):
            (picture, letter), info = super().reset(seed=seed, options=options)
            return [picture, Video.from_array(np.zeros((8, 32, 32, 3), np.uint8), fps=4.0), letter], info

    run = await recorded_run(Films, groups=1, evals=0)
    export_trajectories(run.folder, tmp_path / "out", "tokens", wanted=TrajectoryFilter(split="train", limit=None))
    recorded = {t.id: t for t in run.trajectories(limit=None)}
    rows = load(tmp_path / "out", "images", "videos")["train"]
    assert len(rows) == 4
    for row in rows:
        (sample,) = recorded[row["id"]].samples()
        assert len(row["shown_fps"]) == 1 and row["shown_fps"][0] > 0
        assert row["shown_fps"] == [fps for fps in sample.shown_fps if fps is not None]


async def test_text_without_media_stays_text(recorded_run, tmp_path):  # noqa: F811
    class Words(Bells):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed, options=options)
            return "letter?", {}

    run = await recorded_run(Words, groups=1, evals=0)
    done = export_trajectories(
        run.folder, tmp_path / "out", "sft", wanted=TrajectoryFilter(reward=(-1.0, None), limit=None), env=Words
    )
    found = load(tmp_path / "out")["train"]
    assert done.rows == {"train": 3} and [m["content"] for m in found[0]["messages"]][:2] == ["Listen.", "letter?"]
    assert {"images", "audios", "videos"}.isdisjoint(found.column_names)


def test_an_episode_that_failed_has_no_reward_and_is_not_imitated(tmp_path):
    (tmp_path / "tone").mkdir()
    (tmp_path / "tone" / "config.json").write_text(json.dumps(RunConfig("tone-v0").to_dict()))
    journal = open_journal(tmp_path / "tone" / "journal.db")
    journal.commit(make_group("tone/train/0", versions=(0, None)), "tone")
    journal.close()
    export_trajectories(tmp_path / "tone", tmp_path / "rows")
    assert [row["reward"] for row in load(tmp_path / "rows")["train"]] == [0.0, None]
    done = export_trajectories(tmp_path / "tone", tmp_path / "sft", "sft")
    assert done.rows == {"train": 1} and done.skipped == {"episodes that failed": 1}
    export_trajectories(tmp_path / "tone", tmp_path / "log", "inspect")
    (file,) = (tmp_path / "log").iterdir()
    with zipfile.ZipFile(file) as log:
        results = json.loads(log.read("header.json"))["results"]
        assert json.loads(log.read("samples/train-0_epoch_2.json"))["scores"] == {}
    assert (results["total_samples"], results["completed_samples"]) == (2, 1)
    assert {score["name"]: score["scored_samples"] for score in results["scores"]} == {"env": 1, "reward": 1}


def test_attempts_at_one_position_are_samples_of_their_own_in_a_log_of_inspect(tmp_path):
    (tmp_path / "tone").mkdir()
    (tmp_path / "tone" / "config.json").write_text(json.dumps(RunConfig("tone-v0").to_dict()))
    journal = open_journal(tmp_path / "tone" / "journal.db")
    group = make_group("tone/train/0/failed-1", versions=(None, None, None))
    for attempt, t in enumerate(group.trajectories):
        t.group_index, t.attempts = max(attempt - 1, 0), attempt % 2 + 1
    journal.commit(group, "tone", "failed")
    journal.close()
    assert export_trajectories(tmp_path / "tone", tmp_path / "log", "inspect").rows == {"failed": 3}
    (file,) = (tmp_path / "log").iterdir()
    with zipfile.ZipFile(file) as log:
        names = [name for name in log.namelist() if name.startswith("samples/")]
        assert sorted(names) == [f"samples/train-0-failed-1_epoch_{epoch}.json" for epoch in (1, 2, 3)]
        assert {json.loads(log.read(name))["uuid"] for name in names} == {t.id for t in group.trajectories}
        assert json.loads(log.read("header.json"))["eval"]["config"] == {"epochs": 3}


def test_the_splits_that_can_be_chosen_are_named_where_they_are_chosen():
    cli.add_commands()
    told = CliRunner().invoke(cli.app, ["export", "trajectories", "--help"], env={"COLUMNS": "200"}).output
    page = (Path(__file__).parents[2] / "docs" / "looking.md").read_text()
    for where in (told.partition("--split")[2].partition("--status")[0], page.partition("| `split` |")[2].partition("\n")[0]):
        assert all(split in where for split in ("train", "eval", "warmup", "failed"))


@pytest.mark.parametrize("format", ["sft", "preferences"])
def test_examples_of_the_warm_up_are_not_imitated_unless_they_are_asked_for(tmp_path, format):
    (tmp_path / "tone").mkdir()
    (tmp_path / "tone" / "config.json").write_text(json.dumps(RunConfig("tone-v0").to_dict()))
    journal = open_journal(tmp_path / "tone" / "journal.db")
    for split in ("warmup", "train"):
        group = make_group(f"tone/{split}/0")
        for t in group.trajectories:
            t.messages.append({"role": "assistant", "content": "A"})
        journal.commit(group, "tone", split)
    journal.close()
    done = export_trajectories(tmp_path / "tone", tmp_path / "out", format)
    why = "examples of the warm-up, whose answers are random; --split warmup writes them"
    assert set(done.rows) == {"train"} and done.skipped == {why: 2}
    limited = TrajectoryFilter(sort="oldest", limit=2)
    assert export_trajectories(tmp_path / "tone", tmp_path / "first", format, wanted=limited).rows == done.rows
    if format == "sft":
        asked = TrajectoryFilter(split="warmup")
        assert export_trajectories(tmp_path / "tone", tmp_path / "asked", format, wanted=asked).rows == {"warmup": 2}


async def test_what_cannot_be_written(recorded_run, tmp_path):  # noqa: F811
    run = await recorded_run(groups=1, evals=0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="holds something"):
        export_trajectories(run.folder, tmp_path / "full")
    with pytest.raises(ConfigError, match="no episode to export as datasets"):
        export_trajectories(run.folder, tmp_path / "out", wanted=TrajectoryFilter(reward=99.0))
    with pytest.raises(ConfigError, match="no episode to export as preferences: 1 were left out"):
        export_trajectories(run.folder, tmp_path / "out", "preferences", margin=99.0, env=Bells)
    assert not (tmp_path / "out").exists()
    for ref in run.trajectories()[0].turns[0].media:
        MediaStore(run.folder / "media").path(ref).unlink()
    done = export_trajectories(run.folder, tmp_path / "out")
    assert [why.endswith("is gone") for why in done.skipped] == [True] and done.rows == {"train": 4}


async def test_the_command_and_a_log_of_inspect(recorded_run, tmp_path):  # noqa: F811
    run = await recorded_run()
    cli.add_commands()
    options = ["--to", str(tmp_path / "out"), "--format", "inspect", "--split", "train"]
    done = CliRunner().invoke(cli.app, ["export", "trajectories", str(run.folder), *options])
    assert done.exit_code == 0 and "rows: 8 train" in done.output, done.output
    (file,) = (tmp_path / "out").iterdir()
    with zipfile.ZipFile(file) as log:
        header, summaries = json.loads(log.read("header.json")), json.loads(log.read("summaries.json"))
        samples = {name: json.loads(log.read(name)) for name in log.namelist() if name.startswith("samples/")}
    rewards = [t.reward for t in run.trajectories(split="train", limit=None)]
    scores = {score["name"]: score["metrics"] for score in header["results"]["scores"]}
    assert scores["reward"]["mean"]["value"] == pytest.approx(sum(rewards) / 8) and set(scores) == {
        "reward",
        "env",
        "length",
        "bells",
    }
    assert len(summaries) == len(samples) == 8 and {s["epoch"] for s in summaries} == {1, 2, 3, 4}
    sample = max(samples.values(), key=lambda sample: len(sample["messages"]))
    kinds = [[part["type"] for part in m["content"]] for m in sample["messages"] if isinstance(m["content"], list)]
    assert kinds == [["image", "text"], ["audio", "text"]] and sample["messages"][3]["content"][0]["format"] == "wav"


READ = """
import sys
from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries
log = read_eval_log(sys.argv[1])
assert log.status == "success" and len(log.samples) == 8 and len(read_eval_log_sample_summaries(sys.argv[1])) == 8
longest = max(log.samples, key=lambda sample: len(sample.messages))
assert longest.messages[2].tool_calls[0].arguments == {"times": 2} and longest.scores["bells"].value == 2.0
assert longest.messages[3].content[0].type == "audio" and longest.output.completion == "A"
"""


def inspect_reads(folder, file) -> None:
    """Have Inspect read a log. It has a hundred dependencies, so it is installed apart."""
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
    pip = subprocess.run([python, "-m", "pip", "install", "-q", "inspect-ai==0.3.285"], timeout=280, capture_output=True)
    if pip.returncode:
        pytest.skip(f"Inspect cannot be installed here: {pip.stderr[-300:]}")
    subprocess.run([python, "-c", READ, str(file)], check=True, timeout=120)


@pytest.mark.nightly
@pytest.mark.timeout(600)
async def test_inspect_reads_its_log(recorded_run, tmp_path):  # noqa: F811
    run = await recorded_run()
    export_trajectories(run.folder, tmp_path / "out", "inspect", wanted=TrajectoryFilter(split="train", limit=None))
    (file,) = (tmp_path / "out").iterdir()
    inspect_reads(tmp_path / "venv", file)
