"""What training made of a group: for each token that was trained on, the trainer's logprob, the entropy and the advantage."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from sqlalchemy import Connection, bindparam, select, update
from sqlalchemy.dialects import postgresql, sqlite

from relax_sdk.errors import JournalError
from relax_server.journal.leases import chunks
from relax_server.journal.schema import groups, trained, trajectories


@dataclass(frozen=True)
class TrainedSample:
    """The trained tokens of one of `Trajectory.samples()`: those with loss mask 1, in their order.

    Each array is float32 [trained tokens]; NaN where a value was not computed."""

    logprobs: np.ndarray
    """The trainer's, natural log, before the first update of the step."""
    entropy: np.ndarray
    """Nats, of the trainer's distribution at that token."""
    advantages: np.ndarray


@dataclass(frozen=True)
class TrainedTrajectory:
    """One trajectory of a trained group."""

    id: str
    advantage: float
    """The mean over its trained tokens."""
    gap: float
    """The mean absolute difference of the engine's and the trainer's logprobs over these tokens, nats."""
    samples: Sequence[TrainedSample]


@dataclass(frozen=True)
class TrainedGroup:
    """What one optimizer step made of a group."""

    group_id: str
    step: int
    version: int
    """Weight version that the step began with."""
    trajectories: Sequence[TrainedTrajectory]
    """Members that were left out of the step are not in it."""


class _Sample(msgspec.Struct, array_like=True):
    logprobs: bytes
    entropy: bytes
    advantages: bytes


class _Trajectory(msgspec.Struct, array_like=True):
    id: str
    advantage: float
    gap: float
    samples: list[_Sample]


class _Group(msgspec.Struct, array_like=True):
    version: int
    trajectories: list[_Trajectory]


_encode, _decoder = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(_Group)


def write(connection: Connection, run: str, records: Sequence[TrainedGroup]) -> None:
    """Keep what a step made of groups; a group that is trained again, after a restart, has only its last record.

    Groups that the run does not have are passed over.
    """
    found = {}
    for part in chunks([record.group_id for record in records]):
        query = select(groups.c.id, groups.c.seq).where(groups.c.run == run, groups.c.id.in_(part))
        found.update(connection.execute(query).tuples().all())
    known = [record for record in records if record.group_id in found]
    if not known:
        return
    rows = [dict(seq=found[r.group_id], step=r.step, data=zlib.compress(_encode(_packed(r)), 1)) for r in known]
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = insert(trained)
    changed = {name: statement.excluded[name] for name in ("step", "data")}
    connection.execute(statement.on_conflict_do_update(index_elements=["seq"], set_=changed), rows)
    place = (trajectories.c.id == bindparam("the_id")) & (trajectories.c.run == run)
    values = [
        dict(the_id=t.id, step=r.step, advantage=_number(t.advantage), gap=_number(t.gap), at=r.version)
        for r in known
        for t in r.trajectories
    ]
    if values:
        staleness = bindparam("at") - trajectories.c.version_min
        connection.execute(update(trajectories).where(place).values(staleness=staleness), values)


def read(connection: Connection, group_id: str) -> TrainedGroup | None:
    """What training made of a group; None: it was not trained on, or no record was kept.

    Raises:
        JournalError: the record is damaged.
    """
    query = select(trained.c.step, trained.c.data).join(groups, groups.c.seq == trained.c.seq)
    row = connection.execute(query.where(groups.c.id == group_id)).first()
    if row is None:
        return None
    try:
        kept = _decoder.decode(zlib.decompress(row.data))
    except (zlib.error, msgspec.DecodeError) as error:
        raise JournalError(f"the record of training group {group_id!r} cannot be read ({error})") from error
    members = [TrainedTrajectory(t.id, t.advantage, t.gap, [_sample(s) for s in t.samples]) for t in kept.trajectories]
    return TrainedGroup(group_id, row.step, kept.version, members)


def _packed(record: TrainedGroup) -> _Group:
    return _Group(
        record.version,
        [_Trajectory(t.id, t.advantage, t.gap, [_arrays(s) for s in t.samples]) for t in record.trajectories],
    )


def _arrays(sample: TrainedSample) -> _Sample:
    return _Sample(*(np.asarray(a, "<f4").tobytes() for a in (sample.logprobs, sample.entropy, sample.advantages)))


def _sample(kept: _Sample) -> TrainedSample:
    return TrainedSample(*(np.frombuffer(data, "<f4") for data in (kept.logprobs, kept.entropy, kept.advantages)))


def _number(value: float) -> float | None:
    """A finite number, or None: a column of a table that is sorted holds no NaN."""
    return float(value) if np.isfinite(value) else None
