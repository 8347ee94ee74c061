"""Media of observations on their way in: stored once, decoded once, their placeholders counted."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from relax_sdk.media import Media, MediaKey, MediaRef, MediaStore
from relax_server.engines.base import MediaItem
from relax_server.models.processor import MediaFeatures
from relax_server.rollout.threads import CallThreads

if TYPE_CHECKING:
    from relax_server.models.processor import Processor

NO_TENSOR = np.empty((0,), np.float32)
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
        self.decoded = 0
        """Items decoded so far."""
        self._known: OrderedDict[MediaKey, PreparedMedia] = OrderedDict()
        self._coming: dict[MediaKey, asyncio.Future[PreparedMedia]] = {}

    async def take(self, media: Iterable[Media]) -> list[PreparedMedia]:
        """Store and verify items; the same content asked for at the same time is decoded once.

        Raises:
            MediaError: damaged, unreadable, or the store cannot be written.
            EpisodeTimeout: decoding passed its limit.
        """
        started = [self._start(item) for item in media]
        return [item if isinstance(item, PreparedMedia) else await asyncio.shield(item) for item in started]

    def _start(self, media: Media) -> PreparedMedia | asyncio.Future[PreparedMedia]:
        key = media.ref.key
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known
        if key not in self._coming:
            coming = self._coming[key] = self.threads.submit(self._prepare, media, limit=self.limit).future
            coming.add_done_callback(lambda future: self._arrived(key, future))
        return self._coming[key]

    def _arrived(self, key: MediaKey, future: asyncio.Future[PreparedMedia]) -> None:
        del self._coming[key]
        if future.cancelled() or future.exception() is not None:
            return
        self.decoded += 1
        self._known[key] = future.result()
        if len(self._known) > CACHE_ITEMS:
            self._known.popitem(last=False)

    def _prepare(self, media: Media) -> PreparedMedia:
        ref = self.store.put(media)
        features = None
        if ref.kind in self.processor.modalities:
            features = replace(self.processor.features(self.store.get(ref), ref.sha256, ref.kind), tensor=NO_TENSOR)
        return PreparedMedia(ref, MediaItem(ref, str(self.store.path(ref))), self.store.load(ref), features)
