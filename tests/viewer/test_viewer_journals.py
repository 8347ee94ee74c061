"""Journals that are looked at: never written while a program has them, whatever version wrote them."""

import shutil
from pathlib import Path

import pytest
from relax_server.journal import migrate, open_journal, revision_of, sqlite
from relax_server.journal.schema import HEAD
from relax_server.viewer.journals import Journals
from sqlalchemy import text
from viewed_runs import make_run

from relax_sdk.errors import JournalError
from relax_sdk.run_lock import Holder, RunLock


def older(folder: Path) -> Path:
    """A run folder whose journal an older version wrote."""
    folder.mkdir()
    engine = sqlite.connect(folder / "journal.db", 1.0)
    migrate.upgrade(engine, "0010")
    engine.dispose()
    return folder / "journal.db"


def test_a_journal_that_is_read_cannot_be_written(tmp_path: Path) -> None:
    folder = make_run(tmp_path)
    with pytest.raises(JournalError, match="cannot be written"):
        open_journal(folder / "journal.db", read_only=True).put_state("tone", "x", 1)
    with pytest.raises(JournalError, match="there is no journal"):
        open_journal(tmp_path / "none.db", read_only=True)
    assert not (tmp_path / "none.db").exists()


def test_an_older_journal_is_migrated_only_if_nobody_has_the_run(tmp_path: Path) -> None:
    file, journals = older(tmp_path / "run"), Journals()
    with pytest.raises(JournalError, match="written by an older version"):
        open_journal(file, read_only=True)
    with RunLock(file.parent, Holder.here()), pytest.raises(JournalError, match="is in use by process"):
        journals.open(file, file.parent)
    with pytest.raises(JournalError, match="written by an older version"):
        journals.open(file)  # of a service: who knows whether it runs
    assert revision_of(file) == "0010"
    journal = journals.open(file, file.parent)
    assert journal is not None and journal.runs() == []
    assert revision_of(file) == HEAD
    journals.close()


def test_a_journal_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    file = make_run(tmp_path) / "journal.db"
    engine = sqlite.connect(file, 1.0)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(JournalError, match="written by a newer version"):
        Journals().open(file, file.parent)


def test_few_journals_stay_open(tmp_path: Path) -> None:
    first = make_run(tmp_path, "first") / "journal.db"
    journals = Journals(most=1)
    kept = journals.open(first)
    shutil.copytree(first.parent, tmp_path / "second")
    other = journals.open(tmp_path / "second" / "journal.db")
    assert other is not kept and journals.open(first) is not kept
    assert kept is not None and kept.runs() == ["first"]  # who still has it can read from it
    journals.close()
