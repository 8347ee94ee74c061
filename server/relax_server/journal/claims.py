"""Who carries something out, as SQL inside one transaction: a claim, its beat, and what others are refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from sqlalchemy import Connection, delete, insert, select, update

from relax_sdk.errors import ClaimLost
from relax_sdk.run_lock import Holder
from relax_server.journal.schema import claims

_c = claims.c
_PART = 500
"""Names in one statement."""


@dataclass(frozen=True)
class Claimed:
    """What a program has claimed, which others leave alone."""

    holder: Holder
    beat: int
    """Grows while the program lives; between two looks, whatever the clocks of the machines say."""


class Held(NamedTuple):
    """A claim that a write depends on; see `check`."""

    name: str
    holder: str | None
    """`Holder.id`; None: of nobody."""


def current(connection: Connection, name: str) -> Claimed | None:
    """The claim of a name, if there is one."""
    return all_of(connection, [name]).get(name)


def all_of(connection: Connection, names: Sequence[str]) -> dict[str, Claimed]:
    """The claims of some names, as far as there are any."""
    found = {}
    for part in _parts(names):
        for row in connection.execute(select(claims).where(_c.name.in_(part))).mappings():
            holder = Holder.from_dict({name.removeprefix("holder_"): value for name, value in row.items()})
            found[row["name"]] = Claimed(holder, row["beat"])
    return found


def take(connection: Connection, name: str, holder: Holder, instead_of: Claimed | None) -> Claimed | None:
    """Claimed a name; see `Journal.claim`."""
    found = current(connection, name)
    if found is not None and found.holder.id != holder.id and not found.holder.ended() and found != instead_of:
        return found
    grown = 0 if found is None else found.beat + 1
    values = {"name": name, "beat": grown} | {f"holder_{field}": value for field, value in asdict(holder).items()}
    connection.execute(delete(claims).where(_c.name == name))
    connection.execute(insert(claims).values(values))
    return None


def beat(connection: Connection, names: Sequence[str], holder: Holder) -> set[str]:
    """Say that the holder lives; returns the names that are still its own."""
    mine: set[str] = set()
    for part in _parts(names):
        own = _c.name.in_(part) & (_c.holder_id == holder.id)
        mine.update(connection.scalars(update(claims).where(own).values(beat=_c.beat + 1).returning(_c.name)))
    return mine


def end(connection: Connection, name: str, holder: Holder) -> None:
    """Give a claim back; another's stays."""
    connection.execute(delete(claims).where(_c.name == name, _c.holder_id == holder.id))


def revoke(connection: Connection, name: str) -> None:
    """End a claim whose ever it is: what is claimed is over, and who carries it out may write to it no more."""
    connection.execute(delete(claims).where(_c.name == name))


def end_all(connection: Connection, kind: str, holder: Holder) -> None:
    """Give all claims back whose names begin with a kind."""
    connection.execute(delete(claims).where(_c.name.startswith(kind, autoescape=True), _c.holder_id == holder.id))


def lost(connection: Connection, held: Iterable[Held]) -> set[Held]:
    """Claims among some that are not held as they were."""
    wanted = set(held)
    found = all_of(connection, sorted({name for name, _ in wanted})) if wanted else {}
    return {one for one in wanted if (found[one.name].holder.id if one.name in found else None) != one.holder}


def check(connection: Connection, held: Held) -> None:
    """Refuse who works for another program than the one that has the claim.

    Args:
        connection: of the transaction that is to write.
        held: what is written to, and `Holder.id` of the program that it is done for.

    Raises:
        ClaimLost: it is claimed by another program, or is not claimed by that one any more.
    """
    if not lost(connection, [held]):
        return
    claim = current(connection, held.name)
    who = f"it is carried out by {claim.holder}" if claim is not None else "it was given back, or has ended"
    raise ClaimLost(f"{held.name!r} is not this program's: {who}")


def _parts(names: Sequence[str]) -> list[Sequence[str]]:
    return [names[start : start + _PART] for start in range(0, len(names), _PART)]
