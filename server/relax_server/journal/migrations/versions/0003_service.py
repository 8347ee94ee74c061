"""The tables of the rollout service: keys, submitted rollouts, and the events that clients follow."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_sequence = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "keys",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("hash", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("rights", sa.JSON, nullable=False),
        sa.Column("episodes", sa.BigInteger, nullable=False),
        sa.Column("tokens_per_minute", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.Column("revoked_at", sa.Double),
        sa.UniqueConstraint("hash", name="uq_keys_hash"),
    )
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("idempotency_key", sa.String),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("counts", sa.JSON, nullable=False),
        sa.Column("error", sa.String),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.UniqueConstraint("key", "idempotency_key", name="uq_rollouts_key_idempotency_key"),
    )
    op.create_index("ix_rollouts_state", "rollouts", ["state"])
    op.create_table(
        "events",
        sa.Column("seq", _sequence, primary_key=True, autoincrement=True),
        sa.Column("topic", sa.String, nullable=False),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("data", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_topic_seq", "events", ["topic", "seq"])
