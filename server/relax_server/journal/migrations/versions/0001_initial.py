"""Runs, groups with their payloads, trajectories, and the controller's state."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_sequence = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "groups",
        sa.Column("seq", _sequence, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("run", sa.String, sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("split", sa.String, nullable=False),
        sa.Column("env", sa.String, nullable=False),
        sa.Column("task_index", sa.BigInteger, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("version_min", sa.BigInteger, nullable=False),
        sa.Column("version_max", sa.BigInteger, nullable=False),
        sa.Column("consumer", sa.String),
        sa.Column("session", sa.String),
        sa.Column("lease_expires", sa.Double),
        sa.Column("lease_ttl", sa.Double),
        sa.Column("checkpoint", sa.BigInteger),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.UniqueConstraint("id", name="uq_groups_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_groups_run_state_seq", "groups", ["run", "state", "seq"])
    op.create_index("ix_groups_run_state_version_min", "groups", ["run", "state", "version_min"])
    op.create_table(
        "payloads",
        sa.Column("seq", _sequence, sa.ForeignKey("groups.seq"), primary_key=True, autoincrement=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "trajectories",
        sa.Column("seq", _sequence, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String, nullable=False),
        sa.Column("group_id", sa.String, sa.ForeignKey("groups.id"), nullable=False),
        sa.Column("run", sa.String, nullable=False),
        sa.Column("split", sa.String, nullable=False),
        sa.Column("env", sa.String, nullable=False),
        sa.Column("task_index", sa.BigInteger, nullable=False),
        sa.Column("status", sa.String, nullable=False),
        sa.Column("reward", sa.Double, nullable=False),
        sa.Column("rewards", sa.JSON, nullable=False),
        sa.Column("version_min", sa.BigInteger),
        sa.Column("version_max", sa.BigInteger),
        sa.Column("n_tokens", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.UniqueConstraint("id", name="uq_trajectories_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_trajectories_run_split_seq", "trajectories", ["run", "split", "seq"])
    op.create_index("ix_trajectories_group_id", "trajectories", ["group_id"])
    op.create_table(
        "state",
        sa.Column("run", sa.String, sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("value", sa.JSON),
    )
