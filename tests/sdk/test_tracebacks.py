"""A script that fails shows its own line and the message, not the SDK's frames."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import relax_sdk as relax

class Failing:
    def fit(self, job, observer):
        try:
            deep(5)
        except KeyError as error:
            raise relax.RunError("the rollout ended: look at logs/rollout.log") from error

def deep(n):
    return deep(n - 1) if n else {}["nothing"]

relax.Trainer("tone-v0", folder="run", runtime=Failing()).fit(progress=False)
"""

STOPPED = """
import signal
import relax_sdk as relax
from relax_sdk.stop_signals import Interrupted

class Stopped:
    def fit(self, job, observer):
        raise Interrupted(signal.SIGINT)

relax.Trainer("tone-v0", folder="run", runtime=Stopped()).fit(progress=False)
"""


@pytest.mark.parametrize("wanted", ["", "full"])
def test_an_expected_error_of_a_script(tmp_path: Path, wanted: str) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    command = [sys.executable, "mine.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=os.environ | {"RELAX_TRACEBACK": wanted}
    )
    lines = done.stderr.splitlines()
    assert lines[-1] == "relax_sdk.errors.RunError: the rollout ended: look at logs/rollout.log"
    frames = [line.split(",")[0].strip() for line in lines if line.startswith("  File ")]
    assert "mine.py" in frames[0]
    if wanted:
        assert "KeyError" in done.stderr and len(frames) > 2
    else:
        assert "KeyError" not in done.stderr and len(frames) == 2, frames


def test_ctrl_c_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(STOPPED)
    environment = os.environ | {"RELAX_TRACEBACK": ""}
    done = subprocess.run(
        [sys.executable, "mine.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment
    )
    lines = done.stderr.splitlines()
    assert lines[-1] == "relax_sdk.stop_signals.Interrupted: stopped by SIGINT"
    frames = [line for line in lines if line.startswith("  File ")]
    assert "mine.py" in frames[0] and len(frames) == 2, frames
