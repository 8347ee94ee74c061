"""Which program carries a run out."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "claims",
        sa.Column("run", sa.String, sa.ForeignKey("runs.id"), primary_key=True),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("holder_id", sa.String, nullable=False),
        sa.Column("holder_pid", sa.BigInteger, nullable=False),
        sa.Column("holder_host", sa.String, nullable=False),
        sa.Column("holder_machine", sa.String, nullable=False),
        sa.Column("holder_born", sa.BigInteger, nullable=False),
        sa.Column("holder_since", sa.Double, nullable=False),
    )
