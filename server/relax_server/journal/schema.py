"""The journal's tables, for SQLite and PostgreSQL; `migrations/` brings a database to this shape."""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
)

from relax_server.journal.columns import Name, Note

HEAD = "0011"
"""The newest revision in `migrations/versions`."""

TRAIN = "train"
"""The split that is leased."""


class GroupState(StrEnum):
    """Where a group is; `ready` → `leased` → `acked` is the way of a trained one."""

    READY = "ready"
    LEASED = "leased"
    ACKED = "acked"
    STALE = "stale"
    """Was too old at a lease, or when it was to be trained on; final."""
    FAILED = "failed"
    """Set aside: it cannot be trained on, and column `failure` says why; final."""
    EMPTY = "empty"
    """Committed without a single response token: nothing to train on, never served."""
    RECORDED = "recorded"
    """The group is of a split that is not trained on, such as `eval`; it is never served."""


metadata = MetaData(
    naming_convention={"ix": "ix_%(table_name)s_%(column_0_N_name)s", "uq": "uq_%(table_name)s_%(column_0_N_name)s"}
)

_sequence = BigInteger().with_variant(Integer, "sqlite")  # only INTEGER counts up by itself in SQLite

runs = Table(
    "runs",
    metadata,
    Column("id", Name, primary_key=True),
    Column("created_at", Double, nullable=False),
    Column("owner", Name),  # id of the key that used the name first; none: a training program; see owners.py
)

groups = Table(
    "groups",
    metadata,
    Column("seq", _sequence, primary_key=True, autoincrement=True),  # the order of commits, whatever the clock says
    Column("id", Name, nullable=False, unique=True),
    Column("run", Name, ForeignKey("runs.id"), nullable=False),
    Column("split", Name, nullable=False),
    Column("env", Name, nullable=False),
    Column("task_index", BigInteger, nullable=False),
    Column("state", Name, nullable=False),
    Column("version_min", BigInteger, nullable=False),
    Column("version_max", BigInteger, nullable=False),
    Column("consumer", Name),  # who leased it last
    Column("session", Name),  # which opening of the journal it was leased through
    Column("lease_expires", Double),  # Unix seconds
    Column("lease_ttl", Double),  # seconds
    Column("checkpoint", BigInteger),  # the one that contains it, once acked
    Column("failure", Note),  # why it was set aside
    Column("created_at", Double, nullable=False),
    Index(None, "run", "state", "seq"),
    Index(None, "run", "state", "version_min"),
    Index(None, "run", "split", "task_index"),
    sqlite_autoincrement=True,
)

payloads = Table(  # apart from `groups`, whose rows are written again at each lease, renewal and ack
    "payloads",
    metadata,
    Column("seq", _sequence, ForeignKey("groups.seq"), primary_key=True, autoincrement=False),
    Column("data", LargeBinary, nullable=False),  # see payload.py
)

trajectories = Table(
    "trajectories",
    metadata,
    Column("seq", _sequence, primary_key=True, autoincrement=True),
    Column("id", Name, nullable=False, unique=True),
    Column("group_id", Name, ForeignKey("groups.id"), nullable=False),
    Column("run", Name, nullable=False),
    Column("split", Name, nullable=False),
    Column("env", Name, nullable=False),
    Column("task_index", BigInteger, nullable=False),
    Column("status", Name, nullable=False),
    Column("reward", Double, nullable=False),
    Column("rewards", JSON, nullable=False),
    Column("version_min", BigInteger),
    Column("version_max", BigInteger),
    Column("n_tokens", BigInteger, nullable=False),  # of responses
    Column("created_at", Double, nullable=False),
    Column("owner", Name),  # id of the key that it was made for; none: of a training run
    Column("group_index", BigInteger),
    Column("turns", BigInteger),
    Column("attempts", BigInteger),
    Column("error", Note),  # its beginning
    Column("media", Name),  # kinds, joined by +
    Column("step", BigInteger),  # that it was trained in, and so are the next three; see trained.py
    Column("advantage", Double),
    Column("gap", Double),
    Column("staleness", BigInteger),
    Index(None, "run", "split", "seq"),
    Index(None, "group_id"),
    sqlite_autoincrement=True,
)

texts = Table(  # apart from `trajectories`, which are listed and sorted by the thousand
    "texts",
    metadata,
    Column("seq", _sequence, ForeignKey("trajectories.seq"), primary_key=True, autoincrement=False),
    Column("text", Note, nullable=False),  # what was said in it, to be searched; see texts.py
)

media = Table(  # each item once a run
    "media",
    metadata,
    Column("seq", _sequence, primary_key=True, autoincrement=True),
    Column("run", Name, ForeignKey("runs.id"), nullable=False),
    Column("sha256", Name, nullable=False),
    Column("mime", Name, nullable=False),
    Column("size", BigInteger, nullable=False),  # bytes
    Column("width", BigInteger),  # pixels, and so is the height
    Column("height", BigInteger),
    Column("duration", Double),  # seconds
    Column("sampling_rate", BigInteger),  # Hz
    Column("fps", Double),
    Column("trajectory_seq", _sequence, ForeignKey("trajectories.seq"), nullable=False),  # the first that showed it
    UniqueConstraint("run", "sha256"),
    sqlite_autoincrement=True,
)

trained = Table(  # what training made of a group's tokens; see trained.py
    "trained",
    metadata,
    Column("seq", _sequence, ForeignKey("groups.seq"), primary_key=True, autoincrement=False),
    Column("step", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
)

state = Table(
    "state",
    metadata,
    Column("run", Name, ForeignKey("runs.id"), primary_key=True),
    Column("key", Name, primary_key=True),
    Column("value", JSON),
)

claims = Table(  # which program carries something out; see claims.py
    "claims",
    metadata,
    Column("name", Name, primary_key=True),  # of a run; or `rollout/`, `training/` and the id of one that a service was sent
    Column("beat", BigInteger, nullable=False),
    Column("holder_id", Name, nullable=False),
    Column("holder_pid", BigInteger, nullable=False),
    Column("holder_host", Name, nullable=False),
    Column("holder_machine", Name, nullable=False),
    Column("holder_born", BigInteger, nullable=False),  # clock ticks since the boot
    Column("holder_since", Double, nullable=False),  # Unix seconds
)

# ------------------------------------------------------------------------------------------- of the rollout service

keys = Table(
    "keys",
    metadata,
    Column("id", Name, primary_key=True),
    Column("hash", Name, nullable=False, unique=True),  # SHA-256 of the key, which is random and long
    Column("name", Name, nullable=False),
    Column("rights", JSON, nullable=False),
    Column("episodes", BigInteger, nullable=False),  # at once
    Column("tokens_per_minute", BigInteger, nullable=False),
    Column("runs", BigInteger, nullable=False, server_default="16"),  # training runs that are not over
    Column("media_bytes_per_day", BigInteger, nullable=False, server_default=str(64 << 30)),
    Column("worker_seconds_per_hour", BigInteger, nullable=False, server_default=str(10 * 3600)),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
)

rollouts = Table(
    "rollouts",
    metadata,
    Column("id", Name, primary_key=True),
    Column("key", Name, nullable=False),  # whose it is
    Column("idempotency_key", Name),
    Column("request", JSON, nullable=False),
    Column("state", Name, nullable=False),
    Column("counts", JSON, nullable=False),
    Column("error", Note),
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("model", Name),  # that it is played with
    UniqueConstraint("key", "idempotency_key"),
    Index(None, "state"),
)

events = Table(
    "events",
    metadata,
    Column("seq", _sequence, primary_key=True, autoincrement=True),
    Column("topic", Name, nullable=False),
    Column("kind", Name, nullable=False),
    Column("data", JSON, nullable=False),
    Column("created_at", Double, nullable=False),
    Index(None, "topic", "seq"),
    sqlite_autoincrement=True,
)

envs = Table(
    "envs",
    metadata,
    Column("id", Name, primary_key=True),
    Column("key", Name, nullable=False),  # whose it is
    Column("source", LargeBinary, nullable=False),  # where its code comes from; see api/environments/source.py
    Column("description", LargeBinary, nullable=False),  # what it is without its code
    Column("created_at", Double, nullable=False),
)

trainings = Table(
    "trainings",
    metadata,
    Column("id", Name, primary_key=True),
    Column("key", Name, nullable=False),  # whose it is
    Column("idempotency_key", Name),
    Column("request", JSON, nullable=False),
    Column("state", Name, nullable=False),
    Column("step", BigInteger, nullable=False),  # the last one that is done
    Column("error", Note),
    Column("server", Name, nullable=False),  # folder and machine that carry it out
    Column("created_at", Double, nullable=False),
    Column("ended_at", Double),
    UniqueConstraint("key", "idempotency_key"),
)
