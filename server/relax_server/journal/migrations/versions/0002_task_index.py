"""An index for the task indices of a run, so that a restarting rollout need not scan all groups ever played."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("ix_groups_run_split_task_index", "groups", ["run", "split", "task_index"])
