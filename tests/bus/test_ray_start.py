"""A Ray cluster of one's own whose node comes up late."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from relax_sdk.errors import BusError

pytest.importorskip("ray", reason="the package ray is not installed (pip install 'relax-gym[ray]')")
pytest.importorskip("transfer_queue", reason="the package TransferQueue is not installed (pip install 'relax-gym[ray]')")

from relax_server.bus import cluster

LATE = "The current node timed out during startup. This could happen because …"


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[subprocess.Popen[bytes]]:
    """Ray's `init` comes up late as many times as the parameter says, and leaves a process behind each time."""
    begun: list[subprocess.Popen[bytes]] = []

    def init(**settings: Any) -> None:
        if len(begun) >= request.param:
            return
        begun.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", "/ray/raylet"]))
        raise Exception(LATE)

    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "token")
    return begun


@pytest.mark.parametrize(("late", "starts"), [(0, True), (2, True), (3, False)], indirect=["late"])
def test_a_node_that_comes_up_late_is_started_again(late: list[subprocess.Popen[bytes]], starts: bool) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        if starts:
            assert cluster.join_cluster(None)
        else:
            with pytest.raises(BusError, match="cannot start a Ray cluster on this machine: The current node timed out"):
                cluster.join_cluster(None)
        assert all(process.poll() is not None for process in late), "what the late starts left behind is gone"
        assert other.poll() is None
    finally:
        for process in (*late, other):
            process.kill()
            process.wait(10)
