"""Reference and advantages as roles of their own: whole runs on this machine through TransferQueue, at the smallest sizes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from our_processes import children
from prepared_job import prepared_job
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout

import relax_sdk as relax
from relax_sdk.runtime import find_runtime
from relax_sdk.spans import read_spans

pytest.importorskip("ray", reason="the package ray is not installed (pip install 'relax-gym[ray]')")
pytest.importorskip("transfer_queue", reason="the package TransferQueue is not installed (pip install 'relax-gym[ray]')")

pytestmark = pytest.mark.timeout(900)  # each run starts a Ray cluster, and what is killed loads its libraries again

SMALL: dict[str, Any] = dict(
    model="relax/tiny-qwen3",
    rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
    warmup={"steps": 2, "batch_size": 4},
    eval={"every": 0, "limit": 2},
    training={"checkpoint_every": 2},
    sampling={"max_new_tokens": 2, "sampling_seed": 3},
    algorithm={"kl_coef": 0.1},
)


class Letters(relax.Env):
    """Name a letter."""

    tasks = staticmethod(lambda: [{"n": n} for n in range(64)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "say a", {}

    def step(self, action):
        return None, len(action.text) + float("a" in action.text.lower()), True, False, {}

    def format_example(self, rng):
        return str(rng.choice(["a", "b"]))


class Watch:
    """An observer that acts when a step is done."""

    def __init__(self, act: Callable[[int], None] = lambda step: None) -> None:
        self.act, self.warnings = act, []

    def stage(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def step(self, metrics: dict) -> None:
        self.act(metrics["step"])


def fit(folder: Path, steps: int, watch: Watch | None = None, resume: bool = False, **settings: Any) -> relax.Run:
    trainer = relax.Trainer(Letters, folder=folder, **(SMALL | settings))
    job = prepared_job(trainer, steps, resume)
    find_runtime("local").fit(job, watch or Watch())
    return relax.Run(job.folder, job.config, job)


def whole(run: relax.Run, steps: int) -> None:
    """Every step was done, no group was lost or trained on twice."""
    assert [row["step"] for row in run.metrics] == list(range(1, steps + 1))
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    assert (counts.acked, counts.leased) == (steps * 4, 0)


def same_losses(local: relax.Run, queued: relax.Run) -> None:
    for a, b in zip(local.metrics, queued.metrics, strict=True):
        for name in ("loss", "kl", "grad_norm", "reward", "entropy"):
            assert b[name] == pytest.approx(a[name], rel=2e-3, abs=1e-5), (name, a["step"])


def kill(role: str) -> int:
    (victim,) = [p for p, command in children().items() if command[2:4] == ["relax_server.roles.child", role]]
    os.kill(victim.pid, signal.SIGKILL)
    return victim.pid


SAME: dict[str, Any] = dict(mode="colocate", max_staleness=0)
"""Both runs train on the same groups: colocate, and with a seed for every token."""


@pytest.fixture(scope="module")
def local_run(tmp_path_factory) -> relax.Run:
    """The run whose trainer computes everything by itself."""
    return fit(tmp_path_factory.mktemp("runs") / "local", 4, **SAME)


def roles_of(run: relax.Run) -> set[str]:
    """Those that have left spans."""
    return {name.rpartition("-")[0] for name, spans in read_spans(run.folder / "timeline").items() if spans}


def test_a_run_learns_the_same_whoever_computes_its_fields(tmp_path, local_run):
    watch = Watch()
    queued = fit(tmp_path / "queued", 4, watch, bus="transfer_queue", **SAME)
    assert watch.warnings == []
    whole(queued, 4)
    same_losses(local_run, queued)
    assert local_run.metrics[-1]["kl"] > 1e-3
    assert roles_of(queued) >= {"advantages", "reference"}
    assert all(row["seconds_wait"] >= row["seconds_fields"] > 0 for row in queued.metrics)
    assert all(row["seconds_fields"] == 0 for row in local_run.metrics)


@pytest.mark.nightly
def test_without_a_kl_term_no_reference_is_started(tmp_path):
    settings: dict[str, Any] = SAME | dict(algorithm={"kl_coef": 0.0})
    local = fit(tmp_path / "local", 2, **settings)
    queued = fit(tmp_path / "queued", 2, bus="transfer_queue", **settings)
    same_losses(local, queued)
    assert "advantages" in roles_of(queued) and "reference" not in roles_of(queued)


@pytest.mark.nightly
def test_each_role_that_is_killed_is_started_again_alone(tmp_path, local_run):
    killed: dict[str, int] = {}

    def act(step: int) -> None:
        for role, at in (("advantages", 1), ("reference", 2)):
            if step == at and role not in killed:
                killed[role] = kill(role)

    watch = Watch(act)
    queued = fit(tmp_path / "queued", 4, watch, bus="transfer_queue", **SAME)
    assert [w.split(" process ended (killed by SIGKILL")[0] for w in watch.warnings] == ["the advantages", "the reference"]
    whole(queued, 4)
    same_losses(local_run, queued)


@pytest.mark.nightly
def test_roles_work_on_the_next_groups_while_the_trainer_trains(tmp_path):
    """And a trainer that is killed takes its queue along: both roles begin anew with the next one."""

    def act(step: int) -> None:
        if step == 3 and not killed:
            killed.append(kill("policy"))

    killed: list[int] = []
    watch = Watch(act)
    run = fit(tmp_path / "run", 6, watch, bus="transfer_queue", max_staleness=2)
    assert killed and "the policy process ended (killed by SIGKILL" in watch.warnings[0]
    assert not any("advantages" in w or "reference" in w for w in watch.warnings), "they ended with the trainer's queue"
    whole(run, 6)
    assert all(row["staleness_max"] <= 2 for row in run.metrics)
    spans = read_spans(run.folder / "timeline")
    events = {role: [e for name, es in spans.items() if name.startswith(role) for e in es] for role in ("policy", "reference")}
    waits = [e for e in events["policy"] if e["name"] == "fields"]
    assert waits and events["reference"]
    early = [e for e in events["reference"] if not any(w["ts"] <= e["ts"] <= w["ts"] + w["dur"] for w in waits)]
    assert early, "the reference worked only while the trainer waited for it"


@pytest.mark.nightly
def test_a_role_that_never_comes_back_ends_the_run(tmp_path, monkeypatch):
    """With how to go on; and the run does go on."""
    monkeypatch.setattr("relax_server.roles.restarts.MAX_RESTARTS", 0)
    killed: list[int] = []

    def act(step: int) -> None:
        if step == 2 and not killed:
            killed.append(kill("advantages"))

    with pytest.raises(relax.RunError, match=r"the advantages ended 1 times(?s:.)*relax train --resume"):
        fit(tmp_path / "run", 5, Watch(act), bus="transfer_queue")
    monkeypatch.undo()
    whole(fit(tmp_path / "run", 5, resume=True, bus="transfer_queue"), 5)
