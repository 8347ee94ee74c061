"""Quotas of keys, and a fair share of the episodes that may be in flight."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from relax_server.api.background import Background
from relax_server.api.keys import Key
from relax_server.gateway.errors import ApiError

LOOK_SECONDS = 0.2
"""Seconds between two looks whether a key has something left again: what others gave back may be there sooner than was
reckoned."""


class FairSlots:
    """Places for episodes. A free one goes to the waiting key that has the fewest, among several to the one that was served
    longest ago, and within a key to who came first.

    Asking and giving up cost the same however many wait.

    Args:
        total: places.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.running: Counter[str] = Counter()
        """Places taken, by key."""
        self.taken = 0
        """Places taken, by all keys."""
        self._waiting: dict[str, OrderedDict[asyncio.Future[None], int]] = {}
        """Who waits, by key, and for how many places; the first to come first."""
        self._limits: dict[str, int] = {}
        """Limits of the keys that wait."""
        self._turns = itertools.count(1)
        self._served: dict[str, int] = {}
        """When each key was served last, while it has places or waits."""

    def of(self, key: str, limit: int) -> KeySlots:
        """The places as one key sees them.

        Args:
            key: its id.
            limit: places that it may have at most.
        """
        return KeySlots(self, key, limit)

    @property
    def waiting(self) -> int:
        """Episodes that wait for a place."""
        return sum(map(len, self._waiting.values()))

    def asked(self, key: str) -> int:
        """Places that a key has or waits for."""
        return self.running[key] + len(self._waiting.get(key, ()))

    async def acquire(self, key: str, limit: int, size: int = 1) -> None:
        """Wait until a key has fewer places than its limit, and take some.

        Args:
            key: its id.
            limit: places that it may have, or exceed by less than `size`.
            size: places to take.
        """
        await self.taken_by(key, self.ask(key, limit, size), size)

    def ask(self, key: str, limit: int, size: int = 1) -> asyncio.Future[None] | None:
        """Take places at once (None), or stand in line for them; then `taken_by` waits for one's turn."""
        if self.taken < self.total and self.running[key] < limit and key not in self._waiting:
            self.take(key, size)
            return None
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, OrderedDict())[place] = size
        self._limits[key] = limit
        return place

    async def reserve(self, key: Key) -> AskedSlot:
        """Ask for a key's place at once, before anything is waited for.

        Raises:
            ApiError: 429; it has, or waits for, as many as it may have.
        """
        if self.asked(key.id) >= key.episodes:
            raise full(key.name, key.episodes)
        return AskedSlot(self, key.id, key.episodes, self.ask(key.id, key.episodes))

    async def taken_by(self, key: str, place: asyncio.Future[None] | None, size: int = 1) -> None:
        """Wait for what `ask` returned; it is given up when the waiting is cancelled."""
        try:
            if place is not None:
                await place
        except asyncio.CancelledError:
            self.give_up(key, place, size)
            raise

    def give_up(self, key: str, place: asyncio.Future[None] | None, size: int = 1) -> None:
        """Give back what `ask` returned, whether or not its turn has come."""
        if place is None or (place.done() and not place.cancelled()):
            self.release(key, size)
            return
        waiting = self._waiting.get(key)
        if waiting is not None and waiting.pop(place, None) is not None and not waiting:
            del self._waiting[key], self._limits[key]
            if key not in self.running:
                self._served.pop(key, None)

    def take(self, key: str, size: int = 1) -> None:
        """Take places, free or not."""
        self.running[key] += size
        self.taken += size
        self._served[key] = next(self._turns)

    def release(self, key: str, size: int = 1) -> None:
        """Give places back."""
        self._free(key, size)
        while self.taken < self.total and (open_ := [k for k in self._waiting if self.running[k] < self._limits[k]]):
            self._serve(min(open_, key=lambda key: (self.running[key], self._served.get(key, 0))))

    def _free(self, key: str, size: int) -> None:
        self.running[key] -= size
        self.taken -= size
        if not self.running[key]:
            del self.running[key]
            if key not in self._waiting:
                self._served.pop(key, None)

    def _serve(self, key: str) -> None:
        place, size = self._waiting[key].popitem(last=False)
        if not self._waiting[key]:
            del self._waiting[key], self._limits[key]
        if not place.done():
            self.take(key, size)
            place.set_result(None)


def full(name: str, episodes: int) -> ApiError:
    """The answer to an opening for which a key has no place."""
    message = f"key {name!r} has {episodes} episodes open already; finish some"
    return ApiError(429, message, "episodes", headers={"Retry-After": "1"})


class KeySlots:
    """`FairSlots` for one key; it takes the place of a semaphore."""

    def __init__(self, slots: FairSlots, key: str, limit: int) -> None:
        self._slots, self._key, self._limit = slots, key, limit

    async def acquire(self) -> None:
        """Wait for a place."""
        await self._slots.acquire(self._key, self._limit)

    def release(self) -> None:
        """Give it back."""
        self._slots.release(self._key)


class AskedSlot(KeySlots):
    """A place that was asked for before its episode was made, so that of many who ask at once each is counted.

    Args:
        slots: of the service.
        key: id of the key that asks.
        limit: places that it may have at most.
        place: what `FairSlots.ask` gave.
    """

    def __init__(self, slots: FairSlots, key: str, limit: int, place: asyncio.Future[None] | None) -> None:
        super().__init__(slots, key, limit)
        self._asked, self._place = True, place

    async def acquire(self) -> None:
        """Wait for the place; once it was given back, for another."""
        if not self._asked:
            return await super().acquire()
        self._asked = False
        await self._slots.taken_by(self._key, self._place)

    def drop(self) -> None:
        """No episode was made: give the place up. Without effect once `acquire` was called."""
        if self._asked:
            self._asked = False
            self._slots.give_up(self._key, self._place)


@dataclass(frozen=True)
class Quota:
    """What a key may use of something in a span of time."""

    name: str
    """Field of `Key` that holds the amount, and code of the error when it is used up."""
    unit: str
    """What is counted, and in which span, for people."""
    seconds: float
    """Length of the span."""


TOKENS = Quota("tokens_per_minute", "tokens a minute", 60.0)
"""Generated ones."""
MEDIA_BYTES = Quota("media_bytes_per_day", "bytes of new media a day", 86_400.0)
"""Bytes that are stored; what is there already costs nothing."""
WORKER_SECONDS = Quota("worker_seconds_per_hour", "worker seconds an hour", 3600.0)
"""Seconds of a processor, of the workers of a key's environments and of the processes that decode its media."""


class KeyRates:
    """What each key has used of its quota lately, as a bucket that fills steadily and holds the amount of one span.

    A call takes all the tokens that it may generate before it is sent, and gives back afterwards what it has not generated:
    calls that are sent together are held to the same quota as calls one after the other. What is known only when it was used,
    such as the time of a processor, may take the bucket below empty.

    Args:
        quota: what is counted.
        clock: seconds, never going back.
    """

    def __init__(self, quota: Quota, clock: Callable[[], float] = time.monotonic) -> None:
        self.quota = quota
        self._amount: Callable[[Key], int] = attrgetter(quota.name)
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}
        self._lines: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Lines of those who wait, by key."""
        self.tell: Callable[[str, str, float, float], None] | None = None
        """Told what is taken: name of the quota, id of the key, how much, and the key's amount for one span."""

    def _level(self, key: Key) -> tuple[float, float]:
        """What a key has left, and the time."""
        return self._filled(key.id, self._amount(key))

    def _filled(self, key: str, amount: float) -> tuple[float, float]:
        now = self._clock()
        left, at = self._left.get(key, (amount, now))
        return min(amount, left + (now - at) / self.quota.seconds * amount), now

    def check(self, key: Key) -> None:
        """Raise if a key has used up its quota; see `charge`."""
        self.charge(key, 0)

    def charge(self, key: Key, amount: float) -> None:
        """Take so much, unless a key has used up its quota.

        Raises:
            ApiError: 429, with the seconds to wait.
        """
        left, now = self._level(key)
        if left <= 0:
            quota = self._amount(key)
            wait = max(1, round(-left / quota * self.quota.seconds + 1))
            message = f"key {key.name!r} has used its {quota} {self.quota.unit}; try again in {wait} s"
            raise ApiError(429, message, self.quota.name, headers={"Retry-After": str(wait)})
        self._take(key, amount, left, now)

    async def wait(self, key: Key, amount: float) -> None:
        """Take so much as soon as a key has anything left; who came first is first."""
        async with self._lines[key.id]:
            while self._level(key)[0] <= 0:  # noqa: ASYNC110 - time alone fills the bucket, and others who give back
                await asyncio.sleep(LOOK_SECONDS)
            self.take(key, amount)

    def take(self, key: Key, amount: float) -> None:
        """Count so much; the bucket may go below empty. A negative amount gives some back."""
        self._take(key, amount, *self._level(key))

    def _take(self, key: Key, amount: float, left: float, now: float) -> None:
        self._left[key.id] = left - amount, now
        if amount and self.tell is not None:
            self.tell(self.quota.name, key.id, amount, self._amount(key))

    def used_elsewhere(self, key: str, amount: float, whole: float) -> None:
        """Count what another worker's `tell` was told."""
        left, now = self._filled(key, whole)
        self._left[key] = left - amount, now


class KeyMeter:
    """`KeyRates` for what one key does; it takes the place of a `relax_server.rollout.calls.Meter`.

    Args:
        rates: of all keys.
        key: that is charged.
        background: where what no request waits for stands in line; None: there is none such.
        urgent: whether a request waits for it, and is refused while nothing is left; otherwise it waits for that, too.
    """

    def __init__(self, rates: KeyRates, key: Key, background: Background | None = None, urgent: bool = True) -> None:
        self._rates, self._key, self._background, self._urgent = rates, key, background, urgent

    async def reserve(self, amount: float) -> None:
        """Take what something may use, before it is done.

        Raises:
            ApiError: 429, if it does not wait.
        """
        if self._background is None:
            self._rates.charge(self._key, amount)
        elif self._urgent:
            self._background.make_way()
            self._rates.charge(self._key, amount)
        else:
            await self._background.turn(self._key.id)
            await self._rates.wait(self._key, amount)

    async def wait(self) -> None:
        """Wait until something is left."""
        await self._rates.wait(self._key, 0.0)

    def check(self) -> None:
        """Raise if nothing is left.

        Raises:
            ApiError: 429, with the seconds to wait.
        """
        self._rates.check(self._key)

    def take(self, amount: float) -> None:
        """Count what was used."""
        self._rates.take(self._key, amount)

    def give_back(self, amount: float) -> None:
        """Return what was reserved and not used."""
        self._rates.take(self._key, -amount)
