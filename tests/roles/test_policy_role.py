"""What the trainer's process tells its controller."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
from relax_server.roles import policy as module
from relax_server.roles.messages import Beat, Stop
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
    role._beat, role._renewed = 0.0, float("inf")
    role.save = lambda last: said.append(("saved", last))
    role.inbox.put(Stop())
    role.train()
    assert said == [Beat(waiting=True), Beat(waiting=False), ("saved", True)]
