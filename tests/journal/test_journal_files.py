"""Files that cannot be a journal, or cannot be written: what the error says."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from relax_server.journal import open_journal, sqlite
from relax_server.journal.sql import SqlJournal
from sample_groups import make_group
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from relax_sdk.errors import JournalError

RUN = "run-1"
WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A journal with twenty groups."""
    path = tmp_path / "journal.db"
    journal = open_journal(path)
    for i in range(20):
        journal.commit(make_group(f"g{i}", tokens=1000), RUN)
    journal.close()
    return path


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that other users can reach, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@pytest.mark.parametrize("existing", [False, True])
def test_a_read_only_folder(public_folder: Path, existing: bool) -> None:
    path = public_folder / "journal.db"
    if existing:
        open_journal(path).close()
        path.chmod(0o444)
    public_folder.chmod(0o555)
    env = os.environ | {"PYTHONPATH": str(WORKER.parents[1])}
    done = subprocess.run(
        [sys.executable, WORKER, "refused", path], capture_output=True, text=True, timeout=60, env=env, check=True
    )
    message = json.loads(done.stdout)
    assert str(path) in message
    assert "allow writing to" in message


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(JournalError, match="cannot be made"):
        open_journal(tmp_path / "taken" / "run" / "journal.db")


def test_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(JournalError, match=r"journal\.db is not a journal.*SQLITE_NOTADB"):
        open_journal(path)


def test_a_database_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE customers (name)")
    connection.close()
    with pytest.raises(JournalError, match=r"database of something else \(tables customers\)"):
        open_journal(path)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("customers",)], "it is left as it was"
    connection.close()


def test_a_damaged_file(file: Path) -> None:
    size = file.stat().st_size
    with open(file, "r+b") as f:
        f.seek(4096 * 2)
        f.write(b"\xff" * (size - 4096 * 2))
    with pytest.raises(JournalError, match="is damaged: restore it from a copy"):
        journal = open_journal(file)
        journal.groups(RUN)


def test_a_damaged_payload_is_found_and_its_batch_stays_ready(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute(
            "UPDATE payloads SET data = CAST(substr(data, 1, 999) || x'00' || substr(data, 1001) AS BLOB) WHERE seq = 2"
        )
    connection.close()
    journal = open_journal(file)
    with pytest.raises(JournalError, match="'g1' is damaged in the journal"):
        journal.lease(3, RUN, "a", 0, 0, 60.0)
    assert journal.counts(RUN).ready == 20
    assert journal.trajectory("g2-0").id == "g2-0"
    journal.close()


def test_a_full_disk(file: Path) -> None:
    journal = open_journal(file)
    assert isinstance(journal, SqlJournal)
    with journal.engine.connect() as connection:  # the pool hands the same connection to the next call of this thread
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(JournalError, match=r"cannot commit group 'big': .*disk is full.*what was committed before is safe"):
        journal.commit(make_group("big", versions=(0,) * 64, tokens=5000), RUN)
    assert journal.counts(RUN).total == len(journal.groups(RUN)) == 20
    with journal.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA max_page_count = 1000000")
    assert journal.commit(make_group("big", versions=(0,) * 64, tokens=5000), RUN)
    journal.close()


def test_a_locked_database(file: Path) -> None:
    journal = open_journal(file, busy_timeout=0.05)
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalError, match=r"cannot commit group 'g': .*locked by another process for 0.05 s"):
        journal.commit(make_group("g"), RUN)
    assert len(journal.groups(RUN)) == 20, "readers do not wait"
    other.execute("ROLLBACK")
    other.close()
    assert journal.commit(make_group("g"), RUN)
    journal.close()


def test_a_transaction_that_will_write_takes_the_lock_before_it_reads(file: Path) -> None:
    journal = open_journal(file)
    assert isinstance(journal, SqlJournal)
    other = sqlite3.connect(file, isolation_level=None, timeout=0)
    refused: list[str] = []

    def intrude(_c: object, _cursor: object, statement: str, *_: object) -> None:
        if statement.startswith("SELECT") and not refused:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
            refused.append(statement)

    event.listen(journal.engine, "before_cursor_execute", intrude)
    assert journal.commit(make_group("g"), RUN)
    assert refused
    other.close()
    journal.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mysql://host/db", "mysql:// journals are not supported"),
        ("sqlite://", "names no file"),
        (":memory:", "names no file"),
        ("", "names no file"),
    ],
)
def test_names_that_are_no_file(name: str, why: str) -> None:
    with pytest.raises(JournalError, match=why):
        open_journal(name)


def test_a_folder_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="is a folder; name a file in it"):
        open_journal(tmp_path)


def test_a_url_and_a_path_name_the_same_file(file: Path) -> None:
    journal = open_journal(f"sqlite:///{file}")
    assert journal.counts(RUN).ready == 20
    journal.close()


def test_commits_are_durable_and_foreign_keys_hold(file: Path) -> None:
    journal = open_journal(file)
    assert isinstance(journal, SqlJournal)
    with journal.engine.connect() as connection:
        values = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    assert values == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
    journal.close()


def test_a_new_file_that_another_process_is_opening_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pauses = tmp_path / "journal.db", []
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE rows (id INTEGER)")
    other.execute("BEGIN EXCLUSIVE")

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            other.execute("COMMIT")

    monkeypatch.setattr("time.sleep", pause)
    engine = sqlite.connect(path, busy_timeout=0.0)
    with pytest.raises(OperationalError, match="locked"):
        sqlite.prepare(engine, busy_timeout=0.0)
    assert pauses == []
    sqlite.prepare(engine, busy_timeout=30.0)
    assert len(pauses) == 3
    engine.dispose()
    other.close()
    with sqlite3.connect(path) as opened:
        assert opened.execute("PRAGMA journal_mode").fetchone() == ("wal",)
