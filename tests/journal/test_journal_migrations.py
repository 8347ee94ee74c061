"""Older, newer and new databases."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from relax_server.journal import migrate, migrations, open_journal, schema, sqlite
from relax_server.journal.claims import Claimed
from relax_server.journal.payload import pack
from relax_server.journal.sql import SqlJournal
from sample_groups import make_group
from sqlalchemy import Engine, MetaData, insert, select, text

from relax_sdk.errors import JournalError
from relax_sdk.run_lock import Holder

RUN = "run-1"


def scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", migrations.__path__[0])
    return ScriptDirectory.from_config(config)


def database(path: Path, revision: str) -> Engine:
    engine = sqlite.connect(path, busy_timeout=5.0)
    sqlite.prepare(engine, busy_timeout=5.0)
    migrate.upgrade(engine, revision)
    return engine


def test_the_code_knows_the_newest_revision() -> None:
    assert scripts().get_current_head() == schema.HEAD
    assert [script.revision for script in scripts().walk_revisions()] == [f"{n:04}" for n in range(11, 0, -1)]


def test_the_revisions_lead_to_the_tables_of_the_schema(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "journal.db")
    assert isinstance(journal, SqlJournal)
    with journal.engine.connect() as connection:
        assert migrate.revision(connection) == schema.HEAD
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    journal.close()


def test_a_journal_of_the_first_revision_keeps_its_groups(tmp_path: Path) -> None:
    path, group = tmp_path / "journal.db", make_group("g", task_index=3)
    engine = database(path, "0001")
    old = MetaData()
    old.reflect(engine)
    with engine.connect().execution_options(**sqlite.WRITE) as connection, connection.begin():
        connection.execute(insert(old.tables["runs"]).values(id=RUN, created_at=1.0))
        row = {"id": "g", "run": RUN, "split": "train", "env": group.env, "task_index": 3, "state": "leased"}
        row |= {"version_min": 0, "version_max": 0, "consumer": "a", "lease_expires": 0.0, "created_at": 1.0}
        seq = connection.execute(insert(old.tables["groups"]).values(row)).inserted_primary_key[0]
        connection.execute(insert(old.tables["payloads"]).values(seq=seq, data=pack(group)))
    engine.dispose()
    journal = open_journal(path)
    assert journal.task_indices(RUN) == [3]
    assert [lease.group for lease in journal.lease(1, RUN, "b", 0, 0, 60.0).leases] == [group]
    journal.close()


def test_trajectories_of_older_rollouts_find_their_owner(tmp_path: Path) -> None:
    path, rollout = tmp_path / "journal.db", "r_0123456789abcdef"
    engine = database(path, "0003")
    old = MetaData()
    old.reflect(engine)
    groups = {"r_0123456789abcdef/train/0": "key_a", "sessions/s_0123456789abcdef": None}
    with engine.connect().execution_options(**sqlite.WRITE) as connection, connection.begin():
        connection.execute(insert(old.tables["runs"]).values(id=RUN, created_at=1.0))
        row = dict(id=rollout, key="key_a", request={}, state="completed", counts={}, created_at=1.0)
        connection.execute(insert(old.tables["rollouts"]).values(row))
        for id in groups:
            place = dict(run=RUN, split="train", env="e", task_index=0, version_min=0, version_max=0, created_at=1.0)
            group = make_group(id)
            seq = connection.execute(insert(old.tables["groups"]).values(id=id, state="ready", **place)).inserted_primary_key[0]
            connection.execute(insert(old.tables["payloads"]).values(seq=seq, data=pack(group)))
            row = place | dict(id=group.trajectories[0].id, group_id=id, status="completed", reward=0.0, rewards={}, n_tokens=1)
            connection.execute(insert(old.tables["trajectories"]).values(row))
    engine.dispose()
    journal = open_journal(path)
    assert isinstance(journal, SqlJournal)
    for id, owner in groups.items():
        found = journal.owned_trajectory(make_group(id).trajectories[0].id)
        assert found is not None and found[1] == owner
    journal.close()


def test_older_runs_belong_to_their_only_owner(tmp_path: Path) -> None:
    """One that several keys have used, or none, stays nobody's; a key's newer quotas are the defaults."""
    path = tmp_path / "journal.db"
    engine = database(path, "0007")
    old = MetaData()
    old.reflect(engine)
    used = {"hers": ["key_a", "key_a"], "shared": ["key_a", "key_b"], "half": ["key_a", None], "program": [None], "empty": []}
    with engine.connect().execution_options(**sqlite.WRITE) as connection, connection.begin():
        key = dict(id="key_a", hash="h", name="a", rights=["run"], episodes=1, tokens_per_minute=1, created_at=1.0)
        connection.execute(insert(old.tables["keys"]).values(key))
        for run, owners in used.items():
            connection.execute(insert(old.tables["runs"]).values(id=run, created_at=1.0))
            for number, owner in enumerate(owners):
                row = dict(id=f"{run}-{number}", run=run, split="train", env="e", task_index=0, created_at=1.0)
                connection.execute(insert(old.tables["groups"]).values(row | dict(state="ready", version_min=0, version_max=0)))
                more = dict(group_id=row["id"], owner=owner, status="completed", reward=0.0, rewards={}, n_tokens=1)
                connection.execute(insert(old.tables["trajectories"]).values(row | more))
    engine.dispose()
    journal = open_journal(path)
    assert isinstance(journal, SqlJournal)
    with journal.reading("look") as connection:
        found = dict(connection.execute(select(schema.runs.c.id, schema.runs.c.owner)).tuples().all())
        quotas = (schema.keys.c.runs, schema.keys.c.media_bytes_per_day, schema.keys.c.worker_seconds_per_hour)
        assert connection.execute(select(*quotas)).one() == (16, 64 << 30, 36_000)
    assert found == {"hers": "key_a", "shared": None, "half": None, "program": None, "empty": None}
    journal.close()


def test_a_claim_outlives_an_upgrade(tmp_path: Path) -> None:
    path, holder = tmp_path / "journal.db", Holder(7, "vm1", "elsewhere", born=3, since=2.0, id="one")
    engine = database(path, "0008")
    old = MetaData()
    old.reflect(engine)
    with engine.connect().execution_options(**sqlite.WRITE) as connection, connection.begin():
        connection.execute(insert(old.tables["runs"]).values(id=RUN, created_at=1.0))
        row = {f"holder_{name}": value for name, value in asdict(holder).items()}
        connection.execute(insert(old.tables["claims"]).values(run=RUN, beat=41, **row))
    engine.dispose()
    journal = open_journal(path)
    assert journal.claim(RUN, Holder.here()) == Claimed(holder, 41) and journal.beat(RUN, holder)
    journal.close()


def test_a_journal_newer_than_the_code_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    engine = database(path, schema.HEAD)
    with engine.connect().execution_options(**sqlite.WRITE) as connection, connection.begin():
        connection.execute(text("UPDATE alembic_version SET version_num = '0999'"))
    with pytest.raises(
        JournalError, match=r"newer version of Relax Gym \(revision 0999, this version knows up to 0011\): upgrade Relax Gym"
    ):
        open_journal(path)
    with engine.connect() as connection:
        assert migrate.revision(connection) == "0999"
    engine.dispose()


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    engine = database(path, "0001")
    with engine.connect().execution_options(**sqlite.WRITE) as connection, connection.begin():
        connection.execute(text("CREATE INDEX ix_groups_run_split_task_index ON groups (id)"))  # in the way of revision 2
    with pytest.raises(JournalError, match=r"cannot open it: .*already exists"):
        open_journal(path)
    with engine.connect() as connection:
        assert migrate.revision(connection) == "0001"
    engine.dispose()
