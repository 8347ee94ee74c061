"""Claims are of anything by its name, not of runs alone; a rollout's takes the place of the time until which it was held."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    connection = op.get_bind()
    kept = connection.execute(sa.text("SELECT run AS name, claims.* FROM claims")).mappings().all()
    op.drop_table("claims")
    claims = op.create_table(
        "claims",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("holder_id", sa.String, nullable=False),
        sa.Column("holder_pid", sa.BigInteger, nullable=False),
        sa.Column("holder_host", sa.String, nullable=False),
        sa.Column("holder_machine", sa.String, nullable=False),
        sa.Column("holder_born", sa.BigInteger, nullable=False),
        sa.Column("holder_since", sa.Double, nullable=False),
    )
    op.bulk_insert(claims, [{column.name: row[column.name] for column in claims.c} for row in kept])
    op.drop_column("rollouts", "server")
    op.drop_column("rollouts", "held_until")
