"""Whole runs on this machine: real engine, journal, trainer and environment processes, at the smallest sizes."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys

import grafana_board
import numpy as np
import psutil
import pytest
from local_runs import SAME_WEIGHTS, SMALL, left_behind, trainer
from prometheus_client import CollectorRegistry, generate_latest
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout
from relax_server.trackers.base import flatten
from relax_server.trackers.prometheus import PrometheusTracker
from run_tokens import tokens_of
from typer.testing import CliRunner

import relax_sdk as relax
from relax_sdk.cli import add_commands, app


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> relax.Run:
    replay = {"training": SMALL["training"] | {"replay_routes": True}}
    shown = {"trackers": ("tensorboard", "prometheus"), "options": {"prometheus": {"port": 0}}}
    return trainer(tmp_path_factory.mktemp("runs") / "tone", tracking=shown, **replay).fit(steps=3, progress=False)


def test_a_run_leaves_everything_to_look_at(finished):
    folder = finished.folder
    for name in ("config.json", "metrics.jsonl", "reward.png", "journal.db", "media", "hf", "checkpoints", "tensorboard"):
        assert (folder / name).exists(), name
    assert [row["step"] for row in finished.metrics] == [1, 2, 3]
    assert list(finished.history.index) == [1, 2, 3]
    assert any(folder.joinpath("tensorboard").iterdir())
    assert json.loads(folder.joinpath("trackers", "prometheus.json").read_text())["port"] > 0
    assert not left_behind()


def test_every_step_reports_what_a_user_is_shown(finished):
    row = finished.metrics[-1]
    for name in ("reward", "staleness_mean", "queue", "seconds_wait", "seconds_train", "seconds_publish", "tokens_per_second"):
        assert name in row, name
    assert finished.metrics[1]["eval_n"] == 8 and finished.metrics[2]["eval_n"] == 8
    assert row["staleness_histogram"] and all(int(k) <= 1 for k in row["staleness_histogram"])


def test_the_grafana_board_asks_for_what_a_run_exports(finished):
    tracker, registry = PrometheusTracker(), CollectorRegistry()
    for row in finished.metrics:
        tracker.figures(row["step"], dict(flatten(row)))
    registry.register(tracker)
    assert not grafana_board.missing(True, [generate_latest(registry).decode()])


def test_engine_and_trainer_agree_on_fresh_samples(finished):
    fresh = [row["logprob_gap_max"] for row in finished.metrics if row["staleness_max"] == 0]
    assert fresh and max(fresh) <= SAME_WEIGHTS
    first = finished.metrics[0]
    assert first["fresh_tokens"] == {"audio": first["n_response_tokens"]}
    assert all(row["logprob_gap_fresh"].get("audio", 0.0) <= SAME_WEIGHTS for row in finished.metrics)


def test_groups_are_trained_once_and_acked(finished):
    journal = open_journal(RunLayout(finished.folder).journal)
    counts = journal.counts(finished.folder.name)
    assert counts.acked == 3 * 4 and counts.leased == 0
    group = journal.groups(finished.folder.name, limit=1)[0]
    assert len(group.trajectories) == 4 and group.trajectories[0].turns[0].media[0].kind == "audio"


def test_what_training_made_of_each_token_is_in_the_journal(finished):
    journal = open_journal(RunLayout(finished.folder).journal)
    steps = []
    for group in journal.groups(finished.folder.name):
        record = journal.trained(group.id)
        assert record is not None and [t.id for t in record.trajectories] == [t.id for t in group.trajectories]
        steps.append(record.step)
        for trained, trajectory in zip(record.trajectories, group.trajectories, strict=True):
            tokens = [sum(sample.loss_mask) for sample in trajectory.samples()]
            for values in ("logprobs", "entropy", "advantages"):
                kept = [getattr(sample, values) for sample in trained.samples]
                assert [len(k) for k in kept] == tokens and all(np.isfinite(k).all() for k in kept)
            if trajectory.version_min == record.version:
                assert trained.gap <= SAME_WEIGHTS
    assert sorted(steps) == [1] * 4 + [2] * 4 + [3] * 4


def test_the_trained_model_is_a_hugging_face_folder(finished):
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Model

    assert Model.from_pretrained(finished.weights).num_parameters() > 1e6


def test_evaluate_and_generate_use_the_trained_model(finished, capsys, monkeypatch):
    monkeypatch.chdir(finished.folder.parent)
    with relax.Run.load(finished.folder.name) as run:  # a relative folder is as good as an absolute one
        evaluation = run.evaluate(limit=8)
        assert "evaluation of tone-v0 [eval] · starting" in capsys.readouterr().err
        assert evaluation.n == 8 and evaluation.mean_reward == pytest.approx(finished.metrics[-1]["eval_reward"])
        assert isinstance(run.generate("A or B?").text, str)
    assert not left_behind()


def test_a_script_that_evaluates_ends_cleanly(finished):
    script = f"import relax_sdk as relax; print(relax.Run.load({str(finished.folder)!r}).evaluate(limit=4))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "(n=4)" in done.stdout
    assert "Traceback" not in done.stderr
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(finished.folder) in " ".join(p.info["cmdline"] or [])]


def test_a_longer_run_goes_on_where_the_first_ended(tmp_path):
    """With a format warm-up, a KL reference and replayed routes: the trainer has to have all three again."""
    folder = tmp_path / "run"
    replay = SMALL["training"] | {"replay_routes": True}
    trainer(folder, training=replay, algorithm={"kl_coef": 0.03}, warmup={"steps": 2}).fit(steps=2, progress=False)
    run = relax.Trainer.from_run(folder).fit(steps=4, resume=True, progress=False)
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert all(row["kl"] > 0 for row in run.metrics[2:])
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    assert counts.acked == 4 * 4


def test_on_policy_runs_of_one_seed_are_the_same_run_in_either_mode(tmp_path):
    """No sample is old, the tokens are equal, and, as the ratio is to the trainer's own logprobs, the weights are, too."""
    same = {"algorithm": {"old_logprobs": "recompute", "correction": "none"}}
    runs = []
    for settings, offload in (({"mode": "colocate"}, "all"), ({"mode": "async", "max_staleness": 0}, "none")):
        training = SMALL["training"] | {"replay_routes": True, "offload": offload}
        at = tmp_path / settings["mode"]
        run = trainer(at, seed=3, training=training, **settings, **same).fit(steps=3, progress=False)
        assert [row["staleness_max"] for row in run.metrics] == [0, 0, 0]
        assert run.metrics[-1]["dropped_total"] == 0
        assert max(row["logprob_gap_max"] for row in run.metrics) <= SAME_WEIGHTS
        runs.append(run)
    first, second = (tokens_of(run, 3 * 4) for run in runs)
    assert first == second and len(first) == 3 * 4 * 4
    assert (runs[0].weights / "model.safetensors").read_bytes() == (runs[1].weights / "model.safetensors").read_bytes()


def test_an_episode_of_a_run_is_played_again_with_the_weights_it_was_played_with(finished):
    add_commands()
    result = CliRunner().invoke(app, ["replay", str(finished.folder), "--episode", "eval/3/1", "--model", "run"])
    assert result.exit_code == 0, result.output
    assert "the same: observations, actions, rewards, " in result.stdout and "sampled tokens" in result.stdout
    assert "note:" not in result.stdout and not left_behind()


def test_colocate_takes_the_engines_memory_only_after_an_evaluation(tmp_path):
    settings = {"mode": "colocate", "eval": {"every": 1, "limit": 200}}
    run = trainer(tmp_path / "run", **settings).fit(steps=4, progress=False)
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert all(row["eval_version_min"] == row["eval_version_max"] == row["step"] for row in run.metrics)
    assert [(row["eval_n"], row["eval_failures"]) for row in run.metrics] == [(200, {})] * 4


def test_larger_staleness_is_kept_within_its_bound(tmp_path):
    run = trainer(tmp_path / "run", max_staleness=3).fit(steps=6, progress=False)
    assert max(row["staleness_max"] for row in run.metrics) <= 3


async def test_fit_works_inside_a_running_event_loop(tmp_path):
    assert asyncio.get_running_loop().is_running()
    run = trainer(tmp_path / "run").fit(steps=1, progress=False)
    assert len(run.metrics) == 1


def test_settings_that_cannot_work_are_refused_at_once(tmp_path):
    with pytest.raises(relax.ConfigError, match="max_staleness must be 0"):
        relax.Trainer("tone-v0", mode="colocate", max_staleness=1)
    with pytest.raises(relax.ConfigError, match="takes no"):
        trainer(tmp_path / "a", model="relax/tiny-llama").fit(progress=False)
    with pytest.raises(relax.ConfigError, match="relax/tiny-omni"):
        trainer(tmp_path / "b", model="no/such-model").fit(progress=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(relax.ConfigError, match="cannot be written"):
        trainer(tmp_path / "file" / "run").fit(progress=False)


def test_a_folder_in_use_is_not_overwritten(finished):
    with pytest.raises(relax.ConfigError, match="already holds a run"):
        trainer(finished.folder).fit(steps=1, progress=False)


def test_a_checkpoint_of_another_configuration_is_refused(finished, tmp_path):

    folder = shutil.copytree(finished.folder, tmp_path / "copy")
    with pytest.raises(relax.ConfigError, match="begun with model"):
        trainer(folder, model="relax/tiny-qwen3").fit(steps=5, resume=True, progress=False)
    with pytest.raises(relax.RunError, match="CheckpointError"):
        trainer(folder, optimizer={"beta2": 0.5}).fit(steps=5, resume=True, progress=False)
