"""`relax admin`: a copy of a service that runs can be restored, with everything that was acknowledged before it was begun."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from postgres_server import PostgresServer
from relax_server.api.backup import MANIFEST, backup, restore
from relax_server.journal import migrate, open_journal, revision_of, sqlite
from relax_server.journal.base import Journal
from relax_server.journal.schema import HEAD
from service_process import Service, start

import relax_sdk as relax
from relax_sdk.errors import ConfigError, JournalError

PIXELS = np.zeros((8, 8, 3), np.uint8)


def admin(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "relax_sdk.cli", "admin", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def play(it: Service) -> str:
    """One session; the id of its trajectory, which is durable."""
    session = it.open(sampling={"max_new_tokens": 1})
    image = relax.Image.from_array(PIXELS).data_uri()
    asked = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]}]
    httpx.post(f"{session['base_url']}/chat/completions", json={"messages": asked}, timeout=60).raise_for_status()
    return httpx.post(f"{it.url}/v1/sessions/{session['id']}/finish", timeout=60).json()["trajectory_id"]


def _has(journal: Journal, id: str) -> bool:
    try:
        return journal.trajectory(id).id == id
    except JournalError:
        return False


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_a_copy_of_a_service_that_runs_is_restored(
    kind: str, tmp_path: Path, service: Service, request: pytest.FixtureRequest
) -> None:
    postgres: PostgresServer | None = request.getfixturevalue("postgres") if kind == "postgresql" else None
    first, second = (postgres.make(), postgres.make()) if postgres is not None else (None, None)
    with service.client() as client:
        engine = client.get("/v1/models").json()["engines"][0]["url"]
    it = start(tmp_path / "one", "--engine", engine, "--drain-seconds", "0", *(["--journal", first] if first else []))
    more: list[str] = []
    stop = threading.Event()

    def keep_playing() -> None:
        while not stop.is_set():
            more.append(play(it))

    try:
        before = [play(it) for _ in range(3)]
        playing = threading.Thread(target=keep_playing)
        playing.start()
        made = admin("backup", tmp_path / "copy", "--folder", it.folder, *(["--journal", first] if first else []))
        stop.set()
        playing.join(60)
        assert made.returncode == 0 and str(tmp_path / "copy") in made.stderr, made.stderr
        assert not (tmp_path / "copy" / "server.id").exists() and (tmp_path / "copy" / MANIFEST).exists()
    finally:
        it.stop()
    back = admin("restore", tmp_path / "copy", "--folder", tmp_path / "two", *(["--journal", second] if second else []))
    assert back.returncode == 0 and "relax serve --folder" in back.stderr, back.stderr
    journal = open_journal(second or tmp_path / "two" / "journal.db")
    kept = {id for id in [*before, *more] if _has(journal, id)}
    journal.close()
    assert kept >= set(before), "all that was acknowledged before"
    assert relax.MediaStore(tmp_path / "two" / "media").get(relax.Image.from_array(PIXELS).ref)


def test_what_cannot_be_copied_or_restored(tmp_path: Path) -> None:
    def quiet(text: str) -> None: ...

    folder = tmp_path / "service"
    with pytest.raises(ConfigError, match="is not the folder of a service"):
        backup(folder, None, tmp_path / "copy", quiet)
    folder.mkdir()
    open_journal(folder / "journal.db").close()
    with pytest.raises(ConfigError, match=r"is not empty \(it has journal\.db"):
        backup(folder, None, folder, quiet)
    backup(folder, None, tmp_path / "copy", quiet)
    with pytest.raises(ConfigError, match="is not empty"):
        restore(tmp_path / "copy", folder, None, quiet)
    with pytest.raises(ConfigError, match="of a file; leave out"):
        restore(tmp_path / "copy", tmp_path / "new", "postgresql://nowhere/db", quiet)
    with pytest.raises(ConfigError, match="is not a backup"):
        restore(folder, tmp_path / "new", None, quiet)
    (folder / "journal.db").write_bytes(b"no database" * 1000)
    with pytest.raises(JournalError, match="cannot copy"):
        backup(folder, None, tmp_path / "other", quiet)


def test_a_password_is_not_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "pg_dump"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\necho "$PGPASSWORD" > {tmp_path}/password\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "service").mkdir()
    with pytest.raises(JournalError, match="pg_dump failed"):
        backup(tmp_path / "service", "postgresql://relax:sesame@db/relax", tmp_path / "copy", lambda text: None)
    assert "sesame" not in (tmp_path / "arguments").read_text() and "relax@db/relax" in (tmp_path / "arguments").read_text()
    assert (tmp_path / "password").read_text() == "sesame\n"


def test_a_restore_that_breaks_off_leaves_the_database_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files come first, and the database in one transaction, so that the whole can be repeated."""
    url, quiet = "postgresql://relax@db/relax", lambda text: None
    for name in ("pg_dump", "pg_restore"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/{name}-called\n[ ! -e {tmp_path}/refuses ]\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "service" / "media").mkdir(parents=True)
    (tmp_path / "service" / "media" / "item").write_bytes(b"x")
    backup(tmp_path / "service", url, tmp_path / "copy", quiet)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copy2", full)
        with pytest.raises(ConfigError, match=r"one cannot be written .*free some room, empty it, and repeat"):
            restore(tmp_path / "copy", tmp_path / "one", url, quiet)
    assert not (tmp_path / "pg_restore-called").exists()
    (tmp_path / "refuses").touch()
    with pytest.raises(JournalError, match=r"nothing of the copy is in the database: remove .*two, and repeat"):
        restore(tmp_path / "copy", tmp_path / "two", url, quiet)
    assert "--single-transaction" in (tmp_path / "pg_restore-called").read_text()


def test_an_older_journal_is_migrated(tmp_path: Path) -> None:
    engine = sqlite.connect(tmp_path / "journal.db", busy_timeout=5.0)
    sqlite.prepare(engine, busy_timeout=5.0)
    migrate.upgrade(engine, "0005")
    engine.dispose()
    checked = admin("migrate", "--check", "--folder", tmp_path)
    assert checked.returncode == 1 and f"is at revision 0005; this version wants {HEAD}" in checked.stderr
    assert revision_of(tmp_path / "journal.db") == "0005", "looking changes nothing"
    done = admin("migrate", "--folder", tmp_path)
    assert done.returncode == 0 and f"0005 → {HEAD}" in done.stderr
    assert admin("migrate", "--check", "--folder", tmp_path).returncode == 0
    missing = admin("migrate", "--folder", tmp_path / "nowhere")
    assert missing.returncode == 1 and "there is no journal" in missing.stderr and "Traceback" not in missing.stderr
