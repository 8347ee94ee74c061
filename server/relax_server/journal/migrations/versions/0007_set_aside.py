"""Why a group cannot be trained on."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("groups", sa.Column("failure", sa.String))
