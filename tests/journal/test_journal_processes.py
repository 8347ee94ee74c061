"""Several processes on one journal, and processes that are killed while they write."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from relax_server.journal import open_journal
from relax_server.journal.base import JournalCounts
from sample_groups import make_group

WORKER = Path(__file__).with_name("worker.py")
RUN = "run-1"


class Worker:
    """A running `worker.py`."""

    def __init__(self, *arguments: Any) -> None:
        env = os.environ | {"PYTHONPATH": str(WORKER.parents[1])}
        command = [sys.executable, str(WORKER), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def line(self) -> Any:
        """Its next message."""
        text = self.stdout.readline()
        assert text, f"the worker ended with {self.process.wait(60)}"
        return json.loads(text)

    def go(self) -> None:
        """Let it begin."""
        self.stdin.write("go\n")
        self.stdin.flush()

    def rest(self) -> list[Any]:
        """All it says until it ends by itself."""
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        return [json.loads(line) for line in out.splitlines()]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(60) == -signal.SIGKILL


@contextmanager
def workers(*each: tuple[Any, ...]) -> Iterator[list[Worker]]:
    started = [Worker(*arguments) for arguments in each]
    try:
        yield started
    finally:
        for worker in started:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait(60)
            worker.stdin.close()
            worker.stdout.close()


@pytest.mark.parametrize("barrier", ["INSERT INTO payloads", "INSERT INTO trajectories", "INSERT INTO texts", "COMMIT"])
def test_a_process_killed_inside_a_commit_leaves_all_of_the_group_or_nothing(tmp_path: Path, barrier: str) -> None:
    file = tmp_path / "journal.db"
    with workers(("commit", file, "g", 5, barrier)) as (writer,):
        assert writer.line() == "g0"
        assert writer.line() == {"waiting at": barrier}
        writer.kill()
    journal = open_journal(file)
    assert [group.id for group in journal.groups(RUN)] == ["g0"]
    assert len(journal.trajectories(RUN)) == 4
    assert journal.commit(make_group("g1", task_index=1), RUN), "the killed writer holds no lock, and its group can come again"
    journal.close()


@pytest.mark.parametrize("after", [1, 4, 9])
def test_every_acknowledged_commit_survives_a_kill(tmp_path: Path, after: int) -> None:
    file = tmp_path / "journal.db"
    with workers(("commit", file, "g", 100_000)) as (writer,):
        told = [writer.line() for _ in range(after)]
        writer.kill()
        told += [json.loads(line) for line in writer.stdout.read().splitlines()]
    journal = open_journal(file)
    found = journal.groups(RUN, limit=100_000, newest_first=False)
    assert [group.id for group in found][: len(told)] == told
    assert len(found) <= len(told) + 1, "at most the last one was durable before it could be told"
    assert len(journal.trajectories(RUN, limit=1_000_000)) == 4 * len(found) == 4 * journal.counts(RUN).ready
    assert journal.trajectory(f"{told[-1]}-3").turns[0].response_ids[-1] == 5009
    journal.close()


def test_processes_never_lease_the_same_group(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    journal = open_journal(file)
    for i in range(60):
        journal.commit(make_group(f"g{i}"), RUN)
    with workers(("lease", file, "a", 2), ("lease", file, "b", 2), ("lease", file, "c", 1)) as consumers:
        for consumer in consumers:
            assert consumer.line() == "ready"
        for consumer in consumers:
            consumer.go()
        got = [id for consumer in consumers for ids in consumer.rest() for id in ids]
    assert sorted(got) == sorted(f"g{i}" for i in range(60))
    assert journal.counts(RUN) == JournalCounts(leased=60)
    journal.close()


def test_processes_commit_at_once(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    with workers(("commit", file, "a", 20), ("commit", file, "b", 20)) as writers:
        told = {id for writer in writers for id in writer.rest()}
    journal = open_journal(file)
    assert {group.id for group in journal.groups(RUN)} == told
    assert len(told) == 40
    journal.close()


def test_processes_may_open_a_new_journal_at_once(tmp_path: Path) -> None:
    file = tmp_path / "runs" / "new" / "journal.db"
    with workers(*[("open", file)] * 6) as openers:
        for opener in openers:
            assert opener.line() == "ready"
        for opener in openers:
            opener.go()
        assert [opener.rest() for opener in openers] == [[0]] * 6
