"""Media of observations on their way in: stored once, decoded once, their placeholders counted."""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from relax_sdk.media import Media, MediaKey, MediaRef, MediaStore
from relax_server.engines.base import MediaItem
from relax_server.models.processor import MediaFeatures
from relax_server.rollout.threads import CallThreads

if TYPE_CHECKING:
    from relax_server.models.processor import Processor

CACHE_ITEMS = 65_536


@dataclass(frozen=True)
class PreparedMedia:
    """One media item that is whole and in the store."""

    ref: MediaRef
    item: MediaItem
    """The item in the form that engines take."""
    part: Media
    """The item as a part of messages that reads its bytes from the store."""
    features: MediaFeatures | None
    """What expansion needs, without the tensor; None where the model does not take this kind."""


class Slots(Protocol):
    """Places for those whose turn it is."""

    async def acquire(self) -> None:
        """Wait for a place."""

    def release(self) -> None:
        """Give it back."""


class Meter(Protocol):
    """Who bytes are charged to that are stored."""

    async def reserve(self, amount: float) -> None:
        """Take what is to be stored.

        Raises:
            RelaxError: it may not be stored.
        """
        ...

    def give_back(self, amount: float) -> None:
        """Return what was not stored."""
        ...


@dataclass
class _Items:
    known: OrderedDict[MediaKey, PreparedMedia] = field(default_factory=OrderedDict)
    coming: dict[MediaKey, asyncio.Future[PreparedMedia]] = field(default_factory=dict)
    decoded: int = 0


class MediaIntake:
    """Takes media into the store, each content once however many episodes show it.

    Args:
        store: where the bytes go; engines and trainer read them there.
        processor: of the model that will see them.
        threads: decode here.
        limit: seconds that storing and decoding one item may take.
    """

    def __init__(self, store: MediaStore, processor: Processor, threads: CallThreads, limit: float) -> None:
        self.store = store
        self.processor = processor
        self.threads = threads
        self.limit = limit
        self._slots: Slots | None = None
        self._meter: Meter | None = None
        self._items = _Items()

    @property
    def decoded(self) -> int:
        """Items decoded so far."""
        return self._items.decoded

    def share(self, slots: Slots, meter: Meter) -> MediaIntake:
        """The same intake, for one of several who share its threads.

        Args:
            slots: places in the threads; each item that is decoded for this one takes a place.
            meter: is charged for the bytes of each item that is stored for this one and was not there.
        """
        shared = copy.copy(self)
        shared._slots, shared._meter = slots, meter
        return shared

    async def take(self, media: Iterable[Media]) -> list[PreparedMedia]:
        """Store and verify items; the same content asked for at the same time is decoded once.

        Raises:
            MediaError: damaged or unreadable.
            RelaxError: the meter refuses to store more.
            StorageError: the store cannot be written.
            EpisodeTimeout: decoding passed its limit.
        """
        started = [self._known(item) or self._start(item, await self._charge(item)) for item in media]
        return [item if isinstance(item, PreparedMedia) else await asyncio.shield(item) for item in started]

    def _known(self, media: Media) -> PreparedMedia | asyncio.Future[PreparedMedia] | None:
        key, items = media.ref.key, self._items
        known = items.known.get(key)
        if known is None:
            return items.coming.get(key)
        items.known.move_to_end(key)
        return known

    async def _charge(self, media: Media) -> int:
        """Reserve the bytes of an item that is not in the store; outside of any turn, as there may be a long wait for them."""
        if self._meter is None or await self.threads.call(self._stored, media, limit=self.limit):
            return 0
        await self._meter.reserve(media.ref.size)
        return media.ref.size

    def _start(self, media: Media, charged: int) -> PreparedMedia | asyncio.Future[PreparedMedia]:
        found = self._known(media)  # another may have brought it meanwhile
        if found is not None:
            self._give_back(charged)
            return found
        key = media.ref.key
        coming = self._items.coming[key] = self._begin(media)
        coming.add_done_callback(lambda future: self._arrived(key, future, charged))
        return coming

    def _give_back(self, charged: int) -> None:
        if self._meter is not None and charged:
            self._meter.give_back(charged)

    def _begin(self, media: Media) -> asyncio.Future[PreparedMedia]:
        if self._slots is None:
            return self.threads.submit(self._prepare, media, limit=self.limit).future
        return asyncio.get_running_loop().create_task(self._in_turn(self._slots, media))

    async def _in_turn(self, slots: Slots, media: Media) -> PreparedMedia:
        await slots.acquire()
        try:
            return await self.threads.call(self._prepare, media, limit=self.limit)
        finally:
            slots.release()

    def _stored(self, media: Media) -> bool:
        return self.store.path(media.ref).exists()

    def _arrived(self, key: MediaKey, future: asyncio.Future[PreparedMedia], charged: int) -> None:
        items = self._items
        del items.coming[key]
        if future.cancelled() or future.exception() is not None:
            self._give_back(charged)
            return
        items.decoded += 1
        items.known[key] = future.result()
        if len(items.known) > CACHE_ITEMS:
            items.known.popitem(last=False)

    def _prepare(self, media: Media) -> PreparedMedia:
        ref = self.store.put(media)
        features = None
        if ref.kind in self.processor.modalities:
            features = self.processor.outline(self.store.get(ref), ref)
        return PreparedMedia(ref, MediaItem(ref, str(self.store.path(ref))), self.store.load(ref), features)
