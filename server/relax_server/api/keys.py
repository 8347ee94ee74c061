"""API keys: random, hashed at rest, with rights and quotas."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from sqlalchemy import insert, select, update

from relax_sdk.errors import ConfigError, JournalError
from relax_server.gateway.digest import digest
from relax_server.journal.schema import keys
from relax_server.journal.sql import SqlJournal

Right = Literal["run", "upload", "admin"]
RIGHTS: frozenset[str] = frozenset(get_args(Right))
"""`run` plays episodes; `upload` brings environments as code; `admin` sees and ends what others do."""
PREFIX = "rlx_"
RUNS = 16
"""Training runs that a key may have under way if nothing else is said."""
MEDIA_BYTES_PER_DAY, WORKER_SECONDS_PER_HOUR = 64 << 30, 10 * 3600
"""New media of a key, and time of processors that its environments and media may take, if nothing else is said."""
KNOWN_SECONDS = 2.0
"""How long a key is believed without asking the database again: a revoked one works that much longer."""
MOST_KNOWN = 10_000
"""Keys and guesses that are remembered; then guesses are forgotten."""
MOST_CHARGED = 10_000
"""Keys whose quotas are remembered."""


@dataclass(frozen=True)
class Key:
    """Who is calling."""

    id: str
    name: str
    rights: frozenset[str]
    episodes: int
    """Episodes at once."""
    tokens_per_minute: int
    """Generated tokens."""
    runs: int = RUNS
    """Training runs that are not over."""
    media_bytes_per_day: int = MEDIA_BYTES_PER_DAY
    """Bytes of media that are stored for it and were not there."""
    worker_seconds_per_hour: int = WORKER_SECONDS_PER_HOUR
    """Seconds of a processor, of its environments' workers and of the processes that decode its media."""
    expires_at: float | None = None
    """Unix seconds."""

    def may(self, right: Right) -> bool:
        """Whether it has a right; `admin` includes the others."""
        return right in self.rights or "admin" in self.rights


LOCAL = Key(
    "local",
    "local",
    frozenset({"run"}),
    episodes=1 << 31,
    tokens_per_minute=1 << 53,
    runs=1 << 31,
    media_bytes_per_day=1 << 53,
    worker_seconds_per_hour=1 << 53,
)
"""Anybody on this machine, while no key was ever made, or at a service that was started with `--no-keys`. Bringing code takes a
key all the same."""


class KeyRing:
    """The keys in the journal's database. Methods block for as long as the database takes.

    Args:
        journal: whose database it is.
        clock: Unix seconds, by which keys expire.
        elapsed: seconds, never going back: for how long a key is believed, and when one that was seen expires at the latest,
            also where the clock is set back.
    """

    def __init__(
        self, journal: SqlJournal, clock: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic
    ) -> None:
        self._journal = journal
        self._clock, self._elapsed = clock, elapsed
        self._known: dict[str, tuple[float, Key | None]] = {}
        self._charged = {LOCAL.id: LOCAL}
        self._last_moments: dict[str, float] = {}
        """By the id of a key: when it expires at the latest, by `elapsed`."""

    def create(
        self,
        name: str,
        rights: Sequence[str] = ("run",),
        episodes: int = 1024,
        tokens_per_minute: int = 10_000_000,
        lifetime: float | None = None,
        runs: int = RUNS,
        media_bytes_per_day: int = MEDIA_BYTES_PER_DAY,
        worker_seconds_per_hour: int = WORKER_SECONDS_PER_HOUR,
    ) -> tuple[str, Key]:
        """Make a key; the secret is returned here and nowhere else.

        Args:
            name: for people.
            rights: of `run`, `upload` and `admin`.
            episodes: at once.
            tokens_per_minute: generated ones.
            lifetime: seconds until it expires; None: never.
            runs: training runs that are not over.
            media_bytes_per_day: bytes of new media.
            worker_seconds_per_hour: seconds of processors.

        Raises:
            ConfigError: an unknown right, or a quota below 1.
            JournalError: it cannot be written.
        """
        wrong = sorted(set(rights) - RIGHTS)
        if wrong or not rights:
            raise ConfigError(f"key rights {wrong or 'none'}; there are {', '.join(sorted(RIGHTS))}")
        quotas = dict(episodes=episodes, tokens_per_minute=tokens_per_minute, runs=runs)
        quotas |= dict(media_bytes_per_day=media_bytes_per_day, worker_seconds_per_hour=worker_seconds_per_hour)
        for what, value in quotas.items():
            if value < 1:
                raise ConfigError(f"key {what} = {value}; allowed: 1 or more")
        if lifetime is not None and lifetime <= 0:
            raise ConfigError(f"key lifetime = {lifetime}; allowed: above 0 seconds")
        secret, now = PREFIX + secrets.token_urlsafe(32), self._clock()
        row: dict[str, Any] = dict(id=f"key_{secrets.token_hex(6)}", name=name, rights=sorted(rights))
        row |= quotas | dict(created_at=now)
        row |= dict(hash=digest(secret), expires_at=now + lifetime if lifetime is not None else None)
        with self._journal.writing("make a key") as connection:
            connection.execute(insert(keys).values(row))
        return secret, _key(row)

    def find(self, secret: str) -> Key | None:
        """The key that a secret belongs to; None if there is none, or it was revoked or has expired."""
        now, hashed = self._elapsed(), digest(secret)
        asked, key = self._known.get(hashed, (-math.inf, None))
        if now - asked > KNOWN_SECONDS:
            with self._journal.reading("look up a key") as connection:
                query = select(keys).where(keys.c.hash == hashed, keys.c.revoked_at.is_(None))
                row = connection.execute(query).mappings().first()
            key = _key(dict(row)) if row is not None else None
            if len(self._known) > MOST_KNOWN:  # guesses are remembered too, so that they cost no query each
                self._keep(lambda known: known is not None)
            self._known[hashed] = now, key
        return key if key is not None and not self._expired(key) else None

    def known(self, secret: str) -> Key | None:
        """As `find`, but only from memory, so that it never blocks; None may mean that it has to be asked."""
        asked, key = self._known.get(digest(secret), (-math.inf, None))
        fresh = key is not None and self._elapsed() - asked <= KNOWN_SECONDS
        return key if fresh and key is not None and not self._expired(key) else None

    def seen(self, secret: str) -> Key | None:
        """The key that a secret belonged to when the database was last asked; it may have ended since. Never blocks."""
        return self._known.get(digest(secret), (-math.inf, None))[1]

    def by_id(self, id: str) -> Key | None:
        """The key with an id, if it works."""
        if id == LOCAL.id:
            return LOCAL
        with self._journal.reading("look up a key") as connection:
            row = connection.execute(select(keys).where(keys.c.id == id, keys.c.revoked_at.is_(None))).mappings().first()
        key = _key(dict(row)) if row is not None else None
        return key if key is not None and not self._expired(key) else None

    def charged(self, id: str) -> Key:
        """The key with an id, whose quotas hold for what goes on in its name also after it has ended.

        Raises:
            JournalError: there never was one.
        """
        if id not in self._charged:
            with self._journal.reading("look up a key") as connection:
                row = connection.execute(select(keys).where(keys.c.id == id)).mappings().first()
            if row is None:
                raise JournalError(f"there is no key {id} that could be charged")
            if len(self._charged) >= MOST_CHARGED:
                self._charged.clear()
            self._charged[id] = _key(dict(row))
        return self._charged[id]

    def charged_before(self, id: str) -> Key | None:
        """As `charged`, but only from memory, so that it never blocks; None: it has to be asked."""
        return self._charged.get(id)

    def any(self) -> bool:
        """Whether a key was ever made, also if it was revoked or has expired since: what was locked once stays so."""
        with self._journal.reading("look for keys") as connection:
            return connection.execute(select(keys.c.id).limit(1)).first() is not None

    def any_works(self) -> bool:
        """Whether there is a key that works."""
        with self._journal.reading("look for keys") as connection:
            rows = connection.execute(select(keys).where(keys.c.revoked_at.is_(None))).mappings()
            return any(not self._expired(_key(dict(row))) for row in rows)

    def ended(self, ids: Collection[str]) -> dict[str, str]:
        """Keys with these ids that work no more, and the reason in words."""
        with self._journal.reading("look for keys that have ended") as connection:
            rows = [dict(row) for row in connection.execute(select(keys).where(keys.c.id.in_(ids))).mappings()]
        ended = {id: f"key {id} is not there any more" for id in ids}
        for row in rows:
            key = _key(row)
            how = "was revoked" if row["revoked_at"] is not None else "has expired" if self._expired(key) else ""
            if how:
                ended[key.id] = f"key {key.name!r} {how}"
            else:
                del ended[key.id]
        return ended

    def list(self) -> list[dict[str, Any]]:
        """All keys without their hashes, oldest first."""
        columns = [column for column in keys.c if column.name != "hash"]
        with self._journal.reading("list keys") as connection:
            rows = connection.execute(select(*columns).order_by(keys.c.created_at)).mappings().all()
        return [{str(name): value for name, value in row.items()} for row in rows]

    def revoke(self, id: str) -> bool:
        """End a key; False if there is none, or it was ended before."""
        with self._journal.writing(f"revoke key {id}") as connection:
            change = update(keys).where(keys.c.id == id, keys.c.revoked_at.is_(None)).values(revoked_at=self._clock())
            done = connection.execute(change).rowcount == 1
        self._keep(lambda known: known is None or known.id != id)
        return done

    def _keep(self, wanted: Callable[[Key | None], bool]) -> None:
        """Forget what is known of the others."""
        for hashed, (_, key) in list(self._known.items()):
            if not wanted(key):
                self._known.pop(hashed, None)

    def _expired(self, key: Key) -> bool:
        """Whether a key's time is over; a clock that is set back after the key was first seen prolongs nothing."""
        if key.expires_at is None:
            return False
        left, now = key.expires_at - self._clock(), self._elapsed()
        last = self._last_moments[key.id] = min(now + left, self._last_moments.get(key.id, math.inf))
        return left <= 0 or last <= now


def _key(row: dict[str, Any]) -> Key:
    values: dict[str, Any] = {field.name: row[field.name] for field in fields(Key)}
    values["rights"] = frozenset(row["rights"])
    return Key(**values)
