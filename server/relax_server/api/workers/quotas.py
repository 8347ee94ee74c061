"""One quota for all workers: worker 0 gives places out to the others, and what keys use is told from each worker to all.

Places are exact: no two workers together begin more episodes than the service or a key may have. What flows (tokens, bytes,
seconds) is counted by each worker in a bucket of its own, and every worker tells the others what was taken from its own within
`SPREAD_SECONDS`. So calls of a key that begin at several workers within that time of each other may take, in all, one bucket
more for each further worker; it is counted in every bucket, and what follows waits until all of it has been filled up again.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from relax_server.api.keys import Key
from relax_server.api.quotas import AskedSlot, FairSlots, KeyRates, full
from relax_server.api.workers.channel import Message
from relax_server.api.workers.place import HOME, WorkerPlace
from relax_server.gateway.errors import ApiError

SPREAD_SECONDS = 0.05
"""Seconds in which what was used gathers before the other workers are told."""
LINE_SECONDS = 30.0
"""Seconds for one question for a place; who still stands in line then asks again, and keeps its turn."""
OPENING_SECONDS = 15.0
"""Seconds after which an opening is not asked for again when worker 0 gives it no place, as it is just started again."""
AGAIN_SECONDS = 0.2
"""Seconds before worker 0 is asked or told again when it takes nothing."""


@dataclass(frozen=True)
class _Asked:
    """Places that a worker has or stands in line for."""

    worker: int
    key: str
    size: int
    place: asyncio.Future[None] | None
    """As `FairSlots.ask` gives it."""


class PlacesOffice:
    """Gives places to the other workers. At worker 0; belongs to one event loop.

    Every question has an id of the worker's, so that one that is sent twice, or comes late, changes nothing.

    Args:
        slots: of the whole service, which worker 0 uses itself.
        place: of worker 0.
    """

    def __init__(self, slots: FairSlots, place: WorkerPlace) -> None:
        self._slots = slots
        self._asked: dict[str, _Asked] = {}
        place.on("places.ask", self._ask)
        place.on("places.return", self._return)
        place.on("places.have", self._have)
        place.when_ended(self._ended)

    def _ask(self, message: Message) -> Awaitable[dict[str, Any] | None]:
        body = message.body
        id, key, limit, size = body["id"], body["key"], body["limit"], body["size"]
        if id not in self._asked:
            if body["now"] and self._slots.asked(key) >= limit:
                raise full(body["name"], limit)
            self._asked[id] = _Asked(message.sender, key, size, self._slots.ask(key, limit, size))
        return self._granted(self._asked[id].place)

    async def _granted(self, place: asyncio.Future[None] | None) -> dict[str, Any] | None:
        if place is not None:
            await asyncio.shield(place)  # whose turn it is is not lost when the question ends
        return None

    def _return(self, message: Message) -> None:
        for id in message.body["ids"]:
            self._give_up(id)

    def _have(self, message: Message) -> None:
        """A worker tells what it got from the worker 0 before this one."""
        for id, key, size in message.body["places"]:
            if id not in self._asked:
                self._slots.take(key, size)
                self._asked[id] = _Asked(message.sender, key, size, None)

    def _ended(self, worker: int) -> None:
        for id in [id for id, asked in self._asked.items() if asked.worker == worker]:
            self._give_up(id)

    def _give_up(self, id: str) -> None:
        asked = self._asked.pop(id, None)
        if asked is None:
            return
        self._slots.give_up(asked.key, asked.place, asked.size)
        if asked.place is not None:
            asked.place.cancel()


class DistantSlots(FairSlots):
    """`FairSlots` of a worker other than worker 0, which it asks for every place. Belongs to one event loop.

    Args:
        total: places of the service.
        place: of this worker.
    """

    def __init__(self, total: int, place: WorkerPlace) -> None:
        super().__init__(total)
        self._place = place
        self._numbers, self._prefix = itertools.count(), secrets.token_hex(6)
        self._lines: dict[asyncio.Future[None], tuple[str, asyncio.Task[None]]] = {}
        """Questions that were not answered yet: their ids, and who asks them."""
        self._have: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        """Ids of the places that this worker has, by key and size."""
        self._returned: list[str] = []
        self._returning: asyncio.Handle | None = None
        place.when_ended(self._ended)

    def ask(self, key: str, limit: int, size: int = 1) -> asyncio.Future[None]:
        """Ask for places; then `taken_by` waits for one's turn."""
        return self._ask(key, limit, size)

    async def reserve(self, key: Key) -> AskedSlot:
        """See `FairSlots.reserve`.

        Raises:
            ApiError: 429; or 503, worker 0 does not answer.
        """
        await self.taken_by(key.id, place := self._ask(key.id, key.episodes, 1, key.name))
        return AskedSlot(self, key.id, key.episodes, place)

    def give_up(self, key: str, place: asyncio.Future[None] | None, size: int = 1) -> None:
        """Give back what `ask` returned, whether or not it was answered."""
        assert place is not None
        line = self._lines.get(place)
        if line is None:
            if not place.cancelled() and place.exception() is None:
                self.release(key, size)
            return
        id, task = line
        task.cancel()
        self._leave_line(key, place)
        self._give_back(id)

    def release(self, key: str, size: int = 1) -> None:
        """Give places back."""
        self._free(key, size)
        ids = self._have[key, size]
        self._give_back(ids.pop())
        if not ids:
            del self._have[key, size]

    def _ask(self, key: str, limit: int, size: int, opening: str | None = None) -> asyncio.Future[None]:
        """Stand in line; with the name of the key that opens something, be refused while the key has all that it may have."""
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        id = f"{self._prefix}-{next(self._numbers)}"
        body = dict(id=id, key=key, limit=limit, size=size, now=opening is not None, name=opening or "")
        self._lines[place] = id, loop.create_task(self._stand_in_line(place, body))
        self._waiting.setdefault(key, OrderedDict())[place] = size
        return place

    async def _stand_in_line(self, place: asyncio.Future[None], body: dict[str, Any]) -> None:
        clock = asyncio.get_running_loop().time
        end = clock() + OPENING_SECONDS
        while True:
            try:
                await self._place.ask(HOME, "places.ask", seconds=LINE_SECONDS, **body)
                break
            except ApiError as error:
                if error.status != 503 or (body["now"] and clock() > end):
                    return self._refused(place, body, error)
            await asyncio.sleep(AGAIN_SECONDS)
        if place.done():  # it was given up at this moment
            return self._refused(place, body, None)
        self._leave_line(body["key"], place)
        self.take(body["key"], body["size"])
        self._have[body["key"], body["size"]].append(body["id"])
        place.set_result(None)

    def _refused(self, place: asyncio.Future[None], body: dict[str, Any], error: ApiError | None) -> None:
        self._leave_line(body["key"], place)
        self._give_back(body["id"])
        if error is not None and not place.done():
            place.set_exception(error)

    def _leave_line(self, key: str, place: asyncio.Future[None]) -> None:
        self._lines.pop(place, None)
        waiting = self._waiting[key]
        del waiting[place]
        if not waiting:
            del self._waiting[key]

    def _give_back(self, id: str) -> None:
        """Tell worker 0 soon; what is given back at one moment is one message."""
        self._returned.append(id)
        if self._returning is None:
            self._returning = asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._returning = None
        try:
            self._place.tell(HOME, "places.return", ids=self._returned)
            self._returned = []
        except ApiError:
            self._returning = asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._tell)

    def _ended(self, worker: int) -> None:
        if worker == HOME:
            asyncio.get_running_loop().call_soon(self._tell_next)  # when what the last one still answered has been heard

    def _tell_next(self) -> None:
        """Tell the next worker 0 what this worker has; it finds that in its inbox before what is asked from now on."""
        places = [(id, key, size) for (key, size), ids in self._have.items() for id in ids]
        try:
            self._place.tell(HOME, "places.have", places=places)
        except ApiError:
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._tell_next)


def shared_slots(total: int, place: WorkerPlace) -> FairSlots:
    """The places of a service as one of its workers sees them."""
    if not place.home:
        return DistantSlots(total, place)
    slots = FairSlots(total)
    if not place.alone:
        PlacesOffice(slots, place)
    return slots


class SharedRates:
    """Tells the other workers what keys use here, and counts what is used there. Belongs to one event loop.

    Args:
        place: of this worker.
        rates: that all workers count together.
    """

    def __init__(self, place: WorkerPlace, rates: Sequence[KeyRates]) -> None:
        self._place = place
        self._rates = {one.quota.name: one for one in rates}
        self._used: defaultdict[str, dict[str, list[float]]] = defaultdict(dict)
        self._telling = False
        for one in rates:
            one.tell = self._note
        place.on("quota.used", self._heard)

    def _note(self, quota: str, key: str, amount: float, whole: float) -> None:
        used = self._used[quota].setdefault(key, [0.0, whole])
        used[0] += amount
        used[1] = whole
        if not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_later(SPREAD_SECONDS, self._tell)

    def _tell(self) -> None:
        used, self._used, self._telling = self._used, defaultdict(dict), False
        self._place.tell_others("quota.used", used=used)

    def _heard(self, message: Message) -> None:
        for quota, keys in message.body["used"].items():
            for key, (amount, whole) in keys.items():
                self._rates[quota].used_elsewhere(key, amount, whole)
