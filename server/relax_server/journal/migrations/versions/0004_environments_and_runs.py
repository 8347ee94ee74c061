"""Environments that were registered at the rollout service, and training runs that were submitted to it."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "envs",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("source", sa.LargeBinary, nullable=False),
        sa.Column("description", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
    )
    op.create_table(
        "trainings",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("key", sa.String, nullable=False),
        sa.Column("idempotency_key", sa.String),
        sa.Column("request", sa.JSON, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("error", sa.String),
        sa.Column("server", sa.String, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.UniqueConstraint("key", "idempotency_key", name="uq_trainings_key_idempotency_key"),
    )
