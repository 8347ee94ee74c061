"""A full disk is named, with what to do, wherever it is noticed first; what was finished before is whole."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from relax_server.journal import open_journal
from relax_server.roles.full_disk import full_disk
from relax_server.roles.layout import RunLayout
from relax_server.roles.messages import Died, Failed
from relax_server.roles.outputs import Outputs
from relax_server.roles.process import RoleProcess
from relax_server.trackers import TrackedRun, Trackers, make_trackers
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import relax_sdk as relax
from relax_sdk.config import RunConfig, TrackingConfig


async def test_a_role_that_cannot_write_its_log_still_says_why_it_ends(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "nonsense.log").symlink_to("/dev/full")
    told: asyncio.Queue[object] = asyncio.Queue()
    role = RoleProcess("nonsense", tmp_path, told.put_nowait)
    await role.start(None)
    message = await asyncio.wait_for(told.get(), 60)
    assert isinstance(message, Failed) and "unknown role 'nonsense'" in message.text
    died = await asyncio.wait_for(told.get(), 60)
    assert isinstance(died, Died) and died.returncode == 1
    await role.stop()


def test_a_full_disk_is_told_from_other_errors(tmp_path):
    try:
        with open("/dev/full", "w") as file:
            file.write("x")
    except OSError as error:
        full = error
    try:
        raise RuntimeError("the checkpoint could not be written") from full
    except RuntimeError as error:
        text = full_disk(error, (tmp_path,))
    assert text is not None and text.startswith(f"the disk is full: {tmp_path}") and "resume the run" in text
    named = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/run/metrics.jsonl")
    assert "/data/run/metrics.jsonl" in (full_disk(named, (tmp_path,)) or "")
    assert full_disk(RuntimeError("I/O error: No space left on device (os error 28)"), ()) is not None  # as safetensors says it
    assert full_disk(OSError(errno.EACCES, "no"), (tmp_path,)) is None
    assert full_disk(ValueError("a wrong value"), (tmp_path,)) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 48 MiB: room for two checkpoints of the small model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"only root may mount a small disk: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_told_once_where_the_figures_are_written(small_disk, tmp_path, monkeypatch):
    layout = RunLayout(tmp_path / "run")
    layout.folder.mkdir()
    layout.metrics.symlink_to(small_disk / "metrics.jsonl")
    outputs = Outputs(layout)
    outputs.write({"step": 1, "reward": 0.5})
    (small_disk / "filling").write_bytes(bytes(small_disk_room(small_disk)))
    with pytest.raises(OSError) as raised:
        for step in range(2, 200):
            outputs.write({"step": step, **{f"figure_{i}": 0.5 for i in range(100)}})
    assert "disk is full" in (full_disk(raised.value, (small_disk,)) or "")
    outputs.close()  # says nothing again
    assert json.loads(layout.metrics.read_text().splitlines()[0]) == {"step": 1, "reward": 0.5}


def test_tensorboard_on_a_full_disk_is_told_of_once_and_ends_nothing(small_disk, tmp_path, monkeypatch):
    """The run's own folder may have room all the same."""
    unhandled, warnings = [], []
    monkeypatch.setattr(threading, "excepthook", unhandled.append)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "tensorboard").symlink_to(small_disk)
    (small_disk / "filling").write_bytes(bytes(small_disk_room(small_disk) - 20_000))
    trackers = Trackers(make_trackers(TrackingConfig()), TrackedRun(folder, RunConfig("tone-v0")), warnings.append)
    trackers.begin()
    for step in range(1, 200):
        trackers.row({"step": step, **{f"figure_{i}": 0.5 for i in range(100)}})
    asyncio.run(trackers.close("done"))
    (told,) = warnings
    assert told.startswith("tracker tensorboard raised OSError") and "No space left" in told and unhandled == []
    (events,) = small_disk.glob("events.out.tfevents.*")
    assert [event.step for event in EventFileLoader(str(events)).Load()][:3] == [0, 1, 2], "what was written before is whole"


@pytest.mark.nightly
@pytest.mark.parametrize("left", [0, 300_000, 4_000_000], ids="{} bytes left".format)
def test_a_disk_that_is_full_from_the_start_is_named(small_disk, left):
    """At the lock, at the journal, at the first checkpoint."""
    (small_disk / "filling").write_bytes(bytes(small_disk_room(small_disk) - left))
    with pytest.raises((relax.ConfigError, relax.RunError), match=r"disk is full|no room"):
        relax.Trainer("tone-v0", folder=small_disk / "run").fit(2, progress=False)


def small_disk_room(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


@pytest.mark.nightly
def test_a_run_whose_disk_fills_up_says_so_and_goes_on_when_there_is_room(small_disk):
    folder = small_disk / "run"
    settings = dict(
        rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
        warmup={"steps": 0},
        eval={"every": 0},
        training={"checkpoint_every": 1, "keep_checkpoints": 100},
    )
    with pytest.raises(relax.RunError, match=r"disk is full"):
        relax.Trainer("tone-v0", folder=folder, **settings).fit(200, progress=False)
    subprocess.run(["mount", "-o", "remount,size=1g", str(small_disk)], check=True)
    done = int(RunLayout(folder).checkpoints()[-1].name.removeprefix("step_")) if RunLayout(folder).checkpoints() else 0
    run = relax.Trainer.from_run(folder).fit(done + 2, resume=True, progress=False)
    assert [row["step"] for row in run.metrics] == list(range(1, done + 3))
    counts = open_journal(RunLayout(folder).journal).counts(folder.name)
    assert counts.acked == (done + 2) * 4 and counts.leased == 0
