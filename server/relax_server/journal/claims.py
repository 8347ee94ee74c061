"""Who carries a run out, as SQL inside one transaction: a claim, its beat, and what others are refused."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import Connection, delete, insert, select, update

from relax_sdk.errors import JournalError
from relax_sdk.run_lock import Holder
from relax_server.journal.schema import claims

_c = claims.c


@dataclass(frozen=True)
class RunClaim:
    """A run as a program has claimed it."""

    holder: Holder
    beat: int
    """Grows while the program lives; between two looks, whatever the clocks of the machines say."""


def current(connection: Connection, run: str) -> RunClaim | None:
    """The claim of a run, if there is one."""
    row = connection.execute(select(claims).where(_c.run == run)).mappings().first()
    if row is None:
        return None
    return RunClaim(Holder.from_dict({name.removeprefix("holder_"): value for name, value in row.items()}), row["beat"])


def take(connection: Connection, run: str, holder: Holder, instead_of: RunClaim | None) -> RunClaim | None:
    """Claim a run; see `Journal.claim`."""
    found = current(connection, run)
    if found is not None and found.holder.id != holder.id and not found.holder.ended() and found != instead_of:
        return found
    values = {"run": run, "beat": 0} | {f"holder_{name}": value for name, value in asdict(holder).items()}
    connection.execute(delete(claims).where(_c.run == run))
    connection.execute(insert(claims).values(values))
    return None


def beat(connection: Connection, run: str, holder: Holder) -> bool:
    """Say that the holder lives; False where the claim is another's."""
    mine = (_c.run == run) & (_c.holder_id == holder.id)
    return connection.execute(update(claims).where(mine).values(beat=_c.beat + 1)).rowcount == 1


def end(connection: Connection, run: str, holder: Holder) -> None:
    """Give a claim back; another's stays."""
    connection.execute(delete(claims).where(_c.run == run, _c.holder_id == holder.id))


def check(connection: Connection, run: str, mine: str | None) -> None:
    """Refuse who works for another program than the one that carries the run out.

    Args:
        connection: of the transaction that is to write.
        run: that it writes to.
        mine: `Holder.id` of the program that it works for; None: for none.

    Raises:
        JournalError: the run is claimed by another program, or is not claimed by that one any more.
    """
    found = connection.scalar(select(_c.holder_id).where(_c.run == run))
    if found == mine:
        return
    claim = current(connection, run)
    who = f"it is carried out by {claim.holder}" if claim is not None else "it was given back"
    raise JournalError(f"run {run!r} is not this program's: {who}")
