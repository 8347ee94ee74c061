"""What the doctor says of a machine and of runs whose figures are known."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import relax_sdk as relax
from relax_sdk.cli import app
from relax_sdk.doctor import engine_busy, examine_machine, examine_run

HEALTHY = {
    "seconds_step": 1.0,
    "seconds_wait": 0.02,
    "seconds_train": 0.95,
    "seconds_publish": 0.03,
    "staleness_mean": 0.9,
    "staleness_max": 1,
    "dropped_total": 0,
    "n_groups": 16,
    "zero_variance_groups": 2,
    "entropy": 0.5,
    "clip_fraction": 0.01,
    "logprob_gap_max": 1e-5,
    "status": {"completed": 256},
    "episode_seconds": {"generate": 0.3, "step": 0.01},
}


def run_folder(tmp_path: Path, busy: float = 0.5, rewards: list[float] | None = None, **changes) -> Path:
    """A run of 12 steps of one second each; the engine computed for a share `busy` of each."""
    config = relax.Trainer("tone-v0").config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    rows = []
    for i in range(12):
        reward = rewards[i] if rewards else 0.25 + 0.05 * i
        rows.append(HEALTHY | {"step": i + 1, "time": 1000.0 + i + 1, "reward": reward} | changes)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "timeline").mkdir()
    spans = [{"name": "generate", "ph": "X", "ts": (1000 + i) * 1e6, "dur": busy * 1e6} for i in range(12)]
    (tmp_path / "timeline" / "engine-7.jsonl").write_text("".join(json.dumps(span) + "\n" for span in spans))
    return tmp_path


def said(folder: Path) -> str:
    return "\n".join(map(str, examine_run(folder)))


def test_a_healthy_run_has_no_problems(tmp_path):
    findings = examine_run(run_folder(tmp_path))
    assert not [f for f in findings if f.level == "problem"]
    text = "\n".join(map(str, findings))
    assert "training 95%" in text and "the engine computed 50% of the time" in text
    assert "the trainer is the slower half" in text


@pytest.mark.parametrize(
    ("busy", "changes", "expected"),
    [
        (0.9, dict(seconds_wait=0.5, seconds_train=0.47), "the engine is the slower half"),
        (
            0.2,
            dict(seconds_wait=0.8, seconds_train=0.17, episode_seconds={"generate": 0.1, "step": 2.0, "total": 2.2}),
            "the environment is the slower half: an episode spends 2.00 s in step",
        ),
        (0.2, dict(seconds_wait=0.8, seconds_train=0.17), "few episodes are in flight"),
        (0.5, dict(seconds_publish=0.2), "publishing weights takes 20%"),
        (0.5, dict(dropped_total=40), "groups were played for nothing"),
        (0.5, dict(clip_fraction=0.5), "50% of the tokens are clipped"),
        (0.5, dict(entropy=0.001), "little is tried any more"),
        (0.5, dict(staleness_max=0, logprob_gap_max=0.2), "replay_routes"),
        (0.5, dict(status={"completed": 200, "truncated": 56}), "22% of the episodes were truncated"),
    ],
)
def test_what_held_a_run_back(tmp_path, busy, changes, expected):
    assert expected in said(run_folder(tmp_path, busy, **changes))


def test_a_reward_that_fell_is_a_problem(tmp_path):
    folder = run_folder(tmp_path, rewards=[0.3, 0.5, 0.9, 0.9, 0.8, 0.4, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3], zero_variance_groups=16)
    assert "! reward fell from 0.900 to 0.300" in said(folder)


def test_restarts_are_seen(tmp_path):
    folder = run_folder(tmp_path)
    (folder / "timeline" / "policy-1.jsonl").touch()
    (folder / "timeline" / "policy-2.jsonl").touch()
    assert "the policy was started 2 times" in said(folder)


def test_groups_whose_episodes_began_differently_are_a_problem(tmp_path):
    text = said(run_folder(tmp_path, rollout_unlike_groups=3))
    assert "in 3 groups the episodes did not begin with the same observation" in text and "self.np_random" in text


def test_an_engine_s_time_is_counted_inside_the_window_only():
    spans = {"engine-1": [{"name": "generate", "ts": 0, "dur": 2e6}, {"name": "paused", "ts": 2e6, "dur": 2e6}]}
    assert engine_busy(spans, 1.0, 3.0) == pytest.approx(0.5)
    assert engine_busy({"policy-1": []}, 0.0, 1.0) is None


def test_a_run_without_enough_steps_is_refused(tmp_path):
    folder = run_folder(tmp_path)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(relax.ConfigError, match="too few"):
        examine_run(folder)
    with pytest.raises(relax.ConfigError, match="not a run folder"):
        examine_run(tmp_path / "nowhere")


def test_this_machine_can_train(tmp_path):
    findings = examine_machine(tmp_path)
    assert not [f for f in findings if f.level == "problem"], findings
    assert any("packages in their tested versions" in f.what for f in findings)


def test_a_package_of_another_version_is_named(monkeypatch, tmp_path):
    from importlib import metadata

    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1" if name == "numpy" else real(name))
    (problem,) = [f for f in examine_machine(tmp_path) if f.level == "problem"]
    assert "numpy is 0.0.1" in problem.what and "make install" in problem.advice


def test_the_command(tmp_path):
    done = CliRunner().invoke(app, ["doctor", str(run_folder(tmp_path))])
    assert done.exit_code == 0 and "0 problems" in done.stdout
    assert dataclasses.is_dataclass(examine_machine()[0])
