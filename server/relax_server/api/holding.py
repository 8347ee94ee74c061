"""Rollouts and training runs that several services share: one service carries each out, and others take over what it leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from sqlalchemy import Connection

from relax_sdk.errors import RelaxError
from relax_sdk.run_lock import Holder
from relax_server.journal import claims
from relax_server.journal.claims import Claimed, Held

logger = logging.getLogger(__name__)

BEAT_SECONDS, LAPSE_SECONDS = 5.0, 15.0
"""Seconds between two signs of life of a service, and without one until others take over what it carried out."""


class Holding:
    """The claims on one kind of thing as one service sees them. Methods run inside the caller's transaction.

    Whether another service lives is told by its beats, between two looks and by this process's own clock, so the clocks of two
    machines need not agree. Writes of a service that lost a claim are refused by `Held`, in the transaction that writes.

    Args:
        kind: `rollout` or `training`.
        holder: this service.
        clock: seconds, never going back.
    """

    def __init__(self, kind: str, holder: Holder, clock: Callable[[], float] = time.monotonic) -> None:
        self._kind, self._holder, self._clock = f"{kind}/", holder, clock
        self._seen: dict[str, tuple[Claimed, float]] = {}
        """Claims of others by name, and since when they have not been beaten."""
        self._looked = clock()

    def held(self, id: str) -> Held:
        """This service's claim, which what it writes depends on."""
        return Held(self._kind + id, self._holder.id)

    def free(self, connection: Connection, ids: Sequence[str]) -> dict[str, bool]:
        """Ids that may be taken: nobody has them, or who had them has ended or gives no sign of life.

        Returns:
            They, each with whether this service had it in an earlier life.
        """
        found, now = claims.all_of(connection, [self._kind + id for id in ids]), self._clock()
        if now - self._looked > LAPSE_SECONDS:  # who cannot look does not see others live either
            self._seen.clear()
        self._looked = now
        seen, self._seen = self._seen, {}
        for name, claim in found.items():
            known = seen.get(name)
            self._seen[name] = known if known is not None and known[0] == claim else (claim, now)
        free = [id for id in ids if self._is_free(self._kind + id, now)]
        return {id: id_of(found.get(self._kind + id)) == self._holder.id for id in free}

    def take(self, connection: Connection, id: str) -> bool:
        """Claim what is new or free; False: another service was faster."""
        known = self._seen.get(self._kind + id)
        lapsed = known[0] if known is not None and self._is_free(self._kind + id, self._clock()) else None
        return claims.take(connection, self._kind + id, self._holder, lapsed) is None

    def beat(self, connection: Connection, ids: Iterable[str]) -> set[str]:
        """Give a sign of life; returns the ids that are still this service's."""
        return {
            name.removeprefix(self._kind) for name in claims.beat(connection, [self._kind + id for id in ids], self._holder)
        }

    def lost(self, connection: Connection, id: str) -> bool:
        """Whether another service has it, or it is over."""
        return bool(claims.lost(connection, [self.held(id)]))

    def end(self, connection: Connection, id: str) -> None:
        """It is over, whoever carries it out: nobody may write to it any more."""
        claims.revoke(connection, self._kind + id)

    def release(self, connection: Connection) -> None:
        """Leave all that this service has to others."""
        claims.end_all(connection, self._kind, self._holder)

    def _is_free(self, name: str, now: float) -> bool:
        claim, since = self._seen.get(name, (None, now))
        if claim is None or claim.holder.ended() or now - since >= LAPSE_SECONDS:
            return True
        return claim.holder.id == self._holder.id and claim.holder != self._holder  # this service's in an earlier life


def id_of(claim: Claimed | None) -> str | None:
    """The `Holder.id` of a claim, if there is one."""
    return claim.holder.id if claim is not None else None


async def keep(turn: Callable[[], Awaitable[None]], what: str) -> None:
    """Hold on to what is carried out here, and take what is free, for ever.

    Args:
        turn: does so once.
        what: it is, for people.
    """
    while True:
        await asyncio.sleep(BEAT_SECONDS)
        try:
            await turn()
        except RelaxError as error:
            logger.warning("cannot hold on to %s: %s", what, error)
        except Exception:
            logger.exception("holding on to %s failed", what)
