"""Trajectories found by what is known of them, without reading their tokens; and the media that a run has shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, select
from sqlalchemy.dialects import postgresql, sqlite

from relax_sdk.errors import ConfigError
from relax_sdk.media_formats import Kind
from relax_sdk.probing import MediaRef
from relax_sdk.trajectory import Status, Trajectory
from relax_server.journal.schema import groups, media, texts, trajectories

Sort = Literal["newest", "oldest", "best", "worst", "longest", "shortest", "stalest"]
SORTS: tuple[Sort, ...] = ("newest", "oldest", "best", "worst", "longest", "shortest", "stalest")


@dataclass(frozen=True)
class TrajectoryRow:
    """A trajectory without its tokens, for lists."""

    seq: int
    """The order of commits; the number by which pages name it."""
    id: str
    group_id: str
    env: str
    split: str
    task_index: int
    status: str
    reward: float | None
    """None: it has none, as it failed, timed out or was cancelled, or is an example of the warm-up."""
    version_min: int | None
    version_max: int | None
    n_tokens: int
    """Response tokens."""
    created_at: float
    """Unix seconds."""
    rewards: dict[str, float] = field(default_factory=dict)
    group_index: int | None = None
    """Position in the group; None, as in the next three: committed by an older version, which did not note it."""
    turns: int | None = None
    attempts: int | None = None
    media: tuple[str, ...] | None = None
    """Kinds of media in its prompts, sorted."""
    error: str | None = None
    """The beginning of its error."""
    step: int | None = None
    """The optimizer step that trained on it last; None, as in the next three: none did, or no record was kept."""
    advantage: float | None = None
    """The mean over its trained tokens."""
    gap: float | None = None
    """The mean absolute difference of engine and trainer logprobs, nats."""
    staleness: int | None = None
    """Optimizer steps between its oldest token and the step."""


@dataclass(frozen=True)
class GroupRow:
    """A group without its trajectories: what became of it."""

    id: str
    split: str
    state: str
    """One of `schema.GroupState`."""
    version_min: int
    version_max: int
    checkpoint: int | None = None
    """The one that contains it; None: it is not acked."""
    failure: str | None = None
    """Why it was set aside; None: it was not."""


@dataclass(frozen=True)
class MediaRow:
    """One image, sound or video that a run has shown."""

    seq: int
    ref: MediaRef
    trajectory_seq: int
    """The first trajectory that showed it."""

    @property
    def kind(self) -> Kind:
        """`image`, `audio` or `video`."""
        return self.ref.kind


@dataclass(frozen=True)
class TrajectoryQuery:
    """Which trajectories are wanted, in which order; a field that is None asks for nothing.

    Raises:
        ConfigError: an order that there is not, a limit below 1, or an offset below 0.
    """

    split: str | None = None
    played: bool = False
    """Only what a policy answered: no examples of the warm-up."""
    statuses: Sequence[str] = ()
    """Any of these; empty: all."""
    reward_min: float | None = None
    """With a bound, those that have no reward are left out."""
    reward_max: float | None = None
    env: str | None = None
    group_id: str | None = None
    task_index: int | None = None
    step: int | None = None
    """The optimizer step that trained on it."""
    text: str | None = None
    """A part of what was said in it; upper and lower case are alike."""
    owner: str | None = None
    """Id of the key that it was made for."""
    after: int | None = None
    """Only those with a larger `seq`."""
    sort: Sort = "newest"
    """`best` and `worst` by reward, those without one last; `longest` and `shortest` by response tokens. Those that are equal
    come newest first."""
    limit: int = 100
    offset: int = 0

    def __post_init__(self) -> None:
        if self.sort not in SORTS:
            raise ConfigError(f"sort={self.sort!r}; allowed: {', '.join(SORTS)}")
        if self.limit < 1 or self.offset < 0:
            raise ConfigError(f"limit={self.limit}, offset={self.offset}; allowed: limit 1 or more, offset 0 or more")


_t = trajectories.c
_scored = and_(_t.status.in_([Status.COMPLETED, Status.TRUNCATED]), _t.split != "warmup")
_reward = case((_scored, _t.reward))
"""The reward of what has one. The column is 0.0 where nothing was scored, which is neither a bad answer nor a good one."""
_NAMES = [c.name for c in _t if c.name not in ("run", "owner")]
_COLUMNS = [_reward if name == "reward" else _t[name] for name in _NAMES]
_GROUP_COLUMNS = [groups.c[each.name] for each in fields(GroupRow)]
_ORDERS: dict[Sort, tuple[ColumnElement[Any], ...]] = {
    "newest": (_t.seq.desc(),),
    "oldest": (_t.seq,),
    "best": (_reward.desc().nulls_last(), _t.seq.desc()),
    "worst": (_reward.nulls_last(), _t.seq.desc()),
    "longest": (_t.n_tokens.desc(), _t.seq.desc()),
    "shortest": (_t.n_tokens, _t.seq.desc()),
    "stalest": (func.coalesce(_t.staleness, -1).desc(), _t.seq.desc()),
}


def find(connection: Connection, run: str, query: TrajectoryQuery) -> list[TrajectoryRow]:
    """Rows of the trajectories that are asked for."""
    statement = _where(select(*_COLUMNS), run, query).order_by(*_ORDERS[query.sort])
    return [_row(row) for row in connection.execute(statement.limit(query.limit).offset(query.offset)).tuples()]


def count(connection: Connection, run: str, query: TrajectoryQuery) -> int:
    """How many there are, whatever limit and offset say."""
    return connection.execute(_where(select(func.count()).select_from(trajectories), run, query)).scalar_one()


def group_row(connection: Connection, group_id: str) -> GroupRow | None:
    """What became of a group; None: it is unknown."""
    row = connection.execute(select(*_GROUP_COLUMNS).where(groups.c.id == group_id)).mappings().first()
    return None if row is None else GroupRow(**row)


def splits(connection: Connection, run: str) -> dict[str, int]:
    """Trajectories of a run by split."""
    statement = select(_t.split, func.count()).where(_t.run == run).group_by(_t.split).order_by(_t.split)
    return dict(connection.execute(statement).tuples().all())


def _where(statement: Select[Any], run: str, query: TrajectoryQuery) -> Select[Any]:
    equal = {"split", "env", "group_id", "task_index", "step", "owner"}
    conditions = [_t.run == run, *(_t[name] == value for name in sorted(equal) if (value := getattr(query, name)) is not None)]
    if query.played:
        conditions.append(_t.split != "warmup")
    if query.statuses:
        conditions.append(_t.status.in_(list(query.statuses)))
    if query.reward_min is not None:
        conditions.append(_reward >= query.reward_min)
    if query.reward_max is not None:
        conditions.append(_reward <= query.reward_max)
    if query.after is not None:
        conditions.append(_t.seq > query.after)
    if query.text:
        statement = statement.join(texts, texts.c.seq == _t.seq)
        conditions.append(texts.c.text.icontains(query.text, autoescape=True))
    return statement.where(*conditions)


def _row(row: Sequence[Any]) -> TrajectoryRow:
    values = dict(zip(_NAMES, row, strict=True))
    if (kinds := values["media"]) is not None:
        values["media"] = tuple(filter(None, kinds.split("+")))
    return TrajectoryRow(**values)


# ------------------------------------------------------------------------------------------------------------------ media


def add_media(connection: Connection, run: str, shown: Sequence[tuple[int, Trajectory]]) -> None:
    """Note which media trajectories have shown; one that the run has already stays as it was noted first.

    Args:
        run: of the trajectories.
        shown: each with its `seq`.
    """
    rows: dict[str, dict[str, Any]] = {}
    for seq, trajectory in shown:
        for turn in trajectory.turns:
            for ref in turn.media:
                rows.setdefault(ref.sha256, dict(run=run, trajectory_seq=seq, **{n: getattr(ref, n) for n in _REF}))
    if rows:
        insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
        connection.execute(insert(media).on_conflict_do_nothing(index_elements=["run", "sha256"]), list(rows.values()))


def list_media(connection: Connection, run: str, after: int, limit: int) -> list[MediaRow]:
    """Media of a run in the order in which they were first shown, those after a `seq`."""
    query = select(media).where(media.c.run == run, media.c.seq > after).order_by(media.c.seq).limit(limit)
    return [
        MediaRow(row["seq"], MediaRef(**{name: row[name] for name in _REF}), row["trajectory_seq"])
        for row in connection.execute(query).mappings()
    ]


_REF = ("sha256", "mime", "size", "width", "height", "duration", "sampling_rate", "fps")
