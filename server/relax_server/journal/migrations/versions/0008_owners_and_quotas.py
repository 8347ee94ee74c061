"""Adds the owner of a run, and how many training runs a key may have at once."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("runs", sa.Column("owner", sa.String))
    op.add_column("keys", sa.Column("runs", sa.BigInteger, nullable=False, server_default="16"))
    whose = "FROM trajectories WHERE trajectories.run = runs.id"
    op.execute(  # a run that several keys have used stays nobody's
        f"UPDATE runs SET owner = (SELECT MIN(trajectories.owner) {whose}) "
        f"WHERE (SELECT COUNT(DISTINCT COALESCE(trajectories.owner, '')) {whose}) = 1"
    )
