"""Adds what a run is looked at by: more about each trajectory, its texts, the media it showed, and what training made of it."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

_big = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    for name, kind in (
        ("group_index", sa.BigInteger),
        ("turns", sa.BigInteger),
        ("attempts", sa.BigInteger),
        ("error", sa.String),
        ("media", sa.String),
        ("step", sa.BigInteger),
        ("advantage", sa.Double),
        ("gap", sa.Double),
        ("staleness", sa.BigInteger),
    ):
        op.add_column("trajectories", sa.Column(name, kind))
    op.create_table(
        "texts",
        sa.Column("seq", _big, sa.ForeignKey("trajectories.seq"), primary_key=True, autoincrement=False),
        sa.Column("text", sa.String, nullable=False),
    )
    op.create_table(
        "media",
        sa.Column("seq", _big, primary_key=True, autoincrement=True),
        sa.Column("run", sa.String, sa.ForeignKey("runs.id"), nullable=False),
        sa.Column("sha256", sa.String, nullable=False),
        sa.Column("mime", sa.String, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("width", sa.BigInteger),
        sa.Column("height", sa.BigInteger),
        sa.Column("duration", sa.Double),
        sa.Column("sampling_rate", sa.BigInteger),
        sa.Column("fps", sa.Double),
        sa.Column("trajectory_seq", _big, sa.ForeignKey("trajectories.seq"), nullable=False),
        sa.UniqueConstraint("run", "sha256", name="uq_media_run_sha256"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "trained",
        sa.Column("seq", _big, sa.ForeignKey("groups.seq"), primary_key=True, autoincrement=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
    )
