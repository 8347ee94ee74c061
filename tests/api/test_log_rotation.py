"""Log files that are too large are begun anew while they are written, and their end is kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from relax_server.api.log_rotation import LogRotation

WRITE = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


def test_a_file_that_is_written_is_begun_anew(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    log.parent.mkdir()
    with log.open("ab") as file:
        writer = subprocess.Popen([sys.executable, "-c", WRITE], stdin=subprocess.PIPE, stdout=file, text=True, bufsize=1)
    assert writer.stdin is not None
    rotation = LogRotation(tmp_path, limit=1000)

    def write(text: str) -> None:
        assert writer.stdin is not None
        before = log.stat().st_size
        writer.stdin.write(text + "\n")
        while log.stat().st_size < before + len(text) + 1:
            assert writer.poll() is None

    write("a" * 2000 + "end of the old one")
    assert rotation.rotate() == [log] and log.stat().st_size == 0
    kept = log.with_name("engine.log.1").read_text()
    assert len(kept) == 1000 and kept.endswith("end of the old one\n")
    write("the new one")
    assert log.read_text() == "the new one\n", "it goes on at the beginning, without a hole"
    assert rotation.rotate() == [] and sorted(p.name for p in log.parent.iterdir()) == ["engine.log", "engine.log.1"]
    writer.stdin.close()
    writer.wait(20)


def test_files_of_runs_and_no_links(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "runs" / "t_1" / "logs" / "run.log", tmp_path / "elsewhere"
    run.parent.mkdir(parents=True)
    run.write_bytes(bytes(50))
    elsewhere.write_bytes(bytes(50))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "env-x.log").symlink_to(elsewhere)
    assert LogRotation(tmp_path, limit=10).rotate() == [run]
    assert elsewhere.stat().st_size == 50
