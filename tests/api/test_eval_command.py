"""`relax eval` as a program: killed, started again, and stopped by Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from relax_server.journal import open_journal

import relax_sdk as relax

TASKS, AT_ONCE = 120, 4
ENV = f"""
import relax_sdk as relax


class Say(relax.Env):
    blocking = False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"question {{options['task']['n']}}?", {{}}

    def step(self, action):
        return None, float(action.text == "Hello!!!"), True, False, {{}}

    @staticmethod
    def tasks():
        return {{split: [{{"n": n}} for n in range({TASKS})] for split in ("train", "eval")}}
"""


@pytest.fixture
def slow_url(tmp_path: Path) -> Iterator[str]:
    """A fake endpoint that answers after 0.1 s."""
    command = [sys.executable, "-m", "benchmarks.fake_engine", "--delay", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None
        yield found.group().rstrip("/")
        server.terminate()


def begin(folder: Path, url: str) -> subprocess.Popen[str]:
    (folder / "say.py").write_text(ENV)
    command = [
        sys.executable,
        "-m",
        "relax_sdk.cli",
        "eval",
        "say.py:Say",
        "--engine-url",
        f"{url}/v1",
        "--engine-model",
        "fake",
    ]
    command += ["--concurrency", str(AT_ONCE), "--out", "out"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(folder: Path, n: int, process: subprocess.Popen[str]) -> int:
    """Until so many episodes are in the journal; how many there are."""
    until, path = time.monotonic() + 60, folder / "out" / "journal.db"
    while time.monotonic() < until and process.poll() is None:
        if path.exists():
            journal = open_journal(path)
            kept = len(journal.trajectories("out", "eval", limit=TASKS))
            journal.close()
            if kept >= n:
                return kept
        time.sleep(0.05)
    raise AssertionError(process.communicate()[1])


def test_killed_and_started_again_it_goes_on(slow_url: str, tmp_path: Path):
    process = begin(tmp_path, slow_url)
    kept = wait_for(tmp_path, 10, process)
    process.kill()
    process.communicate()
    assert kept < TASKS, "it was killed on its way"
    asked = httpx.get(f"{slow_url}/counts").json()["calls"]
    process = begin(tmp_path, slow_url)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert f"{TASKS} episodes of {TASKS} of {TASKS} tasks; 0 failed" in out
    calls = httpx.get(f"{slow_url}/counts").json()["calls"]
    assert calls - asked <= TASKS - kept, "what was durable is not asked again"
    report = relax.EvalReport.load(tmp_path / "out")
    events = [json.loads(line)["kind"] for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert events == ["started", "started", "evaluation", "ended"], "the first one could not say how it ended"
    assert relax.Run.load(tmp_path / "out").metrics[-1]["eval_reward"] == 1.0
    assert report.complete and report.scores.reward.mean == 1.0 and len({e.id for e in report.episodes}) == TASKS


def test_ctrl_c_keeps_what_was_played(slow_url: str, tmp_path: Path):
    process = begin(tmp_path, slow_url)
    wait_for(tmp_path, 5, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "the same command goes on" in err, err
    assert "Traceback" not in err
    assert '"kind": "stopped"' in (tmp_path / "out" / "events.jsonl").read_text()
