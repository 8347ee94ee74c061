"""What the trainer's process tells its controller."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from relax_server.roles import policy as module
from relax_server.roles.messages import Beat, Saved, Stop
from relax_server.roles.policy import PolicyRole
from relax_server.timeline import Timeline

from relax_sdk import RunConfig


def test_a_trainer_that_is_stopped_while_it_waits_says_that_it_goes_on_before_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may take longer than one that waits may be silent."""
    said: list[Any] = []
    monkeypatch.setattr(module, "settle", lambda: None)
    role: Any = object.__new__(PolicyRole)
    role.start, role.policy = SimpleNamespace(config=RunConfig("test-v0")), SimpleNamespace(step=0)
    role.inbox, role.timeline = queue.SimpleQueue(), Timeline(None, "policy")
    role.channel = SimpleNamespace(send=said.append)
    role._beat, role._renewed, role.pending = 0.0, float("inf"), None
    role.save = lambda last: said.append(("saved", last))
    role.inbox.put(Stop())
    role.train()
    assert said == [Beat(waiting=True), Beat(waiting=False), ("saved", True)]


def test_groups_are_acked_when_the_checkpoint_is_complete(tmp_path: Path) -> None:
    done: list[Any] = []
    role: Any = object.__new__(PolicyRole)
    role.start, role.policy = SimpleNamespace(config=RunConfig("test-v0")), SimpleNamespace(step=4, saving=None, parks=False)
    role.timeline, role.records, role.pending, role.unsaved = Timeline(None, "policy"), None, None, ["a", "b"]
    role.told, role.told_before = [{"step": 3}, {"step": 4}], 0
    kept: list[Any] = []
    role.layout = SimpleNamespace(checkpoint=lambda step: tmp_path / str(step), checkpoints=list)
    role.channel = SimpleNamespace(send=done.append)
    role.bus = SimpleNamespace(ack=lambda groups, step: done.append((groups, step)))

    def call(name: str, *args: Any) -> None:
        done.append(name)
        if name == "begin_save":
            kept.append([row["step"] for row in args[1]["figures"]])
        role.policy.saving = SimpleNamespace(done=False, began=1.0, ended=2.0) if name == "begin_save" else None

    role.ranks = SimpleNamespace(call=call)
    role.save()
    role.policy.step, role.unsaved = 5, ["c"]
    role.told.append({"step": 5})
    role.look_at_save()
    assert done == ["begin_save"] and role.unsaved == ["c"]
    role.policy.saving.done = True
    role.look_at_save()
    assert done[1:] == ["finish_save", (["a", "b"], 4), Saved(4, tmp_path / "4", last=False)] and role.unsaved == ["c"]
    role.save()
    role.policy.step, role.unsaved = 6, ["d"]
    role.told.append({"step": 6})
    role.save()  # which waits for the one before
    assert done[4:] == ["begin_save", "finish_save", (["c"], 5), Saved(5, tmp_path / "5", last=False), "begin_save"]
    assert kept == [[3, 4], [3, 4, 5], [4, 5, 6]], "whose rows may not be written yet"
