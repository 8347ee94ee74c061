"""The GPU check itself, on a CPU with tiny models: every part runs, and nothing is over its bar."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_every_part_of_the_check_runs_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--device", "cpu", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    for part in ("attention", "experts", "parity", "step", "engine", "run"):
        assert f"| {part} " in done.stdout, part
    assert "gpu_check needs one NVIDIA GPU" in done.stdout.splitlines()[0]
    assert (tmp_path / "gpu_check_on_cpu.json").exists()
