"""Adds the owner of a trajectory; and which server plays a rollout, with which model, until when if it says nothing more."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("trajectories", sa.Column("owner", sa.String))
    op.add_column("rollouts", sa.Column("server", sa.String))
    op.add_column("rollouts", sa.Column("model", sa.String))
    op.add_column("rollouts", sa.Column("held_until", sa.Double))
    own = "rollouts.id = substr(trajectories.group_id, 1, 18)"  # a group's id begins with that of its rollout
    op.execute(
        f"UPDATE trajectories SET owner = (SELECT rollouts.key FROM rollouts WHERE {own}) "
        f"WHERE EXISTS (SELECT 1 FROM rollouts WHERE {own})"
    )
