"""Adds how many bytes of media a key may have stored in a day, and how much time of processors it may use in an hour."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    for name, amount in (("media_bytes_per_day", 64 << 30), ("worker_seconds_per_hour", 10 * 3600)):
        op.add_column("keys", sa.Column(name, sa.BigInteger, nullable=False, server_default=str(amount)))
