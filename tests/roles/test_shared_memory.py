"""The folder in shared memory: swept after killed runs, and removed from under a writer."""

from __future__ import annotations

import itertools
import os
import threading


def test_what_killed_runs_left_in_shared_memory_is_swept(tmp_path, monkeypatch):
    from relax_server.roles import shared_memory

    monkeypatch.setattr(shared_memory, "root", lambda: tmp_path)
    dead, alive, other = tmp_path / "relax-999999999-abc", tmp_path / f"relax-{os.getpid()}-abc", tmp_path / "relax-notes-x"
    for path in (dead, alive, other):
        path.mkdir()
    shared_memory.sweep()
    assert not dead.exists() and alive.exists() and other.exists()


def test_shared_memory_is_removed_from_under_a_writer(tmp_path):
    from relax_server.roles import shared_memory

    folder = tmp_path / "relax-1-abc"
    (folder / "features").mkdir(parents=True)
    begun, refused = threading.Event(), threading.Event()

    def write() -> None:
        try:
            for i in itertools.count():
                (folder / "features" / str(i)).write_bytes(b"x" * 1000)
                if i == 100:
                    begun.set()
        except FileNotFoundError:
            refused.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert begun.wait(5)
    shared_memory.remove(folder)
    assert list(tmp_path.iterdir()) == []
    assert refused.wait(5)
