"""What is particular to a journal in PostgreSQL; what it shares with SQLite is in the contract suite."""

from __future__ import annotations

import threading

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from postgres_server import PostgresServer, program
from relax_server.api.keys import KeyRing
from relax_server.journal import migrate, open_journal, schema
from relax_server.journal.sql import SqlJournal
from sample_groups import make_group

from relax_sdk.errors import JournalError

RUN = "run-1"


def test_the_revisions_lead_to_the_tables_of_the_schema(postgres: PostgresServer) -> None:
    journal = open_journal(postgres.make())
    assert isinstance(journal, SqlJournal)
    with journal.engine.connect() as connection:
        assert migrate.revision(connection) == schema.HEAD
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), schema.metadata) == []
    journal.close()


def test_servers_that_open_a_new_database_at_once(postgres: PostgresServer) -> None:
    url, opened, failed = postgres.make(), [], []

    def open_() -> None:
        try:
            opened.append(open_journal(url))
        except JournalError as error:
            failed.append(error)

    threads = [threading.Thread(target=open_) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and len(opened) == 6
    assert opened[0].commit(make_group("g"), RUN) and opened[1].groups(RUN)
    for journal in opened:
        journal.close()


def test_several_servers_commit_and_lease_and_nothing_is_served_twice(postgres: PostgresServer) -> None:
    url = postgres.make()
    servers = [open_journal(url) for _ in range(4)]
    served: list[str] = []
    errors: list[BaseException] = []

    def work(number: int) -> None:
        journal = servers[number]
        try:
            for i in range(25):
                journal.commit_many([make_group(f"{number}-{i}-{k}") for k in range(2)], RUN)
                leased = [lease.group.id for lease in journal.lease(2, RUN, f"consumer-{number}", 0, 0, 60.0).leases]
                served.extend(leased)
                journal.ack(leased, RUN, f"consumer-{number}", checkpoint=1)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert len(served) == len(set(served)) == 200
    assert servers[0].counts(RUN).acked == 200
    for journal in servers:
        journal.close()


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    with pytest.raises(JournalError, match=r"postgresql://me:\*\*\*@127.0.0.1:9/db cannot be reached") as caught:
        open_journal("postgresql://me:secret@127.0.0.1:9/db")
    assert "secret" not in str(caught.value)


def test_a_database_that_does_not_exist(postgres: PostgresServer) -> None:
    with pytest.raises(JournalError, match=r"no_such_db.*(does not exist|createdb)"):
        open_journal(postgres.url("no_such_db"))


def test_a_writer_that_holds_the_lock_too_long(postgres: PostgresServer) -> None:
    url = postgres.make()
    one, other = open_journal(url), open_journal(url, busy_timeout=0.3)
    assert isinstance(one, SqlJournal)
    with one.writing("hold the lock"), pytest.raises(JournalError, match=r"stayed locked by another writer for 0\.3 s"):
        other.commit(make_group("g"), RUN)
    assert other.commit(make_group("g"), RUN)
    one.close()
    other.close()


@pytest.mark.nightly
def test_a_database_that_is_restarted_comes_back() -> None:
    """Calls meanwhile fail with a clear word; what was committed is there, and the same journal goes on."""
    initdb, server = program("initdb"), program("postgres")
    if initdb is None or server is None:
        pytest.skip("PostgreSQL is not installed on this machine: apt install postgresql")
    postgres = PostgresServer(initdb, server)
    try:
        journal = open_journal(postgres.make())
        journal.commit(make_group("before"), RUN)
        postgres.stop()
        with pytest.raises(JournalError, match=r"cannot commit group 'during'.*(cannot be reached|shutting down)"):
            journal.commit(make_group("during"), RUN)
        postgres.start()
        assert journal.commit(make_group("after"), RUN)
        assert {group.id for group in journal.groups(RUN)} == {"before", "after"}
        journal.close()
    finally:
        postgres.close()


def test_keys_are_there_for_every_server(postgres: PostgresServer) -> None:
    url = postgres.make()
    one, other = open_journal(url), open_journal(url)
    assert isinstance(one, SqlJournal) and isinstance(other, SqlJournal)
    secret, key = KeyRing(one).create("me")
    assert KeyRing(other).find(secret) == key
    one.close()
    other.close()
