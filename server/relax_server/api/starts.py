"""When groups of rollouts begin: while their key has places for them."""

from __future__ import annotations

import sys
from collections import Counter

from relax_server.api.keys import Key
from relax_server.api.quotas import FairSlots
from relax_server.api.rollout_store import Rollout

WITH_PAUSED = 4
"""A key's paused and other rollouts may together have begun so many times the episodes that it has places for."""


class GroupStarts:
    """Lets a group begin while fewer episodes of its key have begun than the key may have at once.

    One that is larger than what is left, or than all that the key may have, begins all the same when its turn comes, and its
    episodes wait for places. Rollouts that are paused keep no others from beginning.

    Args:
        total: places of the service.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._all, self._going = FairSlots(sys.maxsize), FairSlots(sys.maxsize)
        self._begun: Counter[str] = Counter()
        """Episodes of groups that have begun and are not over, by rollout."""
        self._paused: set[str] = set()

    async def begin(self, rollout: Rollout, key: Key, size: int) -> None:
        """Wait until a group of `size` episodes may begin; `end` must follow."""
        places = min(key.episodes, self._total)
        await self._all.acquire(rollout.key, WITH_PAUSED * places, size)
        try:
            if rollout.id not in self._paused:
                await self._going.acquire(rollout.key, places, size)
                if rollout.id in self._paused:  # since it stood in line
                    self._going.release(rollout.key, size)
        except BaseException:
            self._all.release(rollout.key, size)
            raise
        self._begun[rollout.id] += size

    def end(self, rollout: Rollout, size: int) -> None:
        """A group that has begun is over."""
        self._begun[rollout.id] -= size
        self._all.release(rollout.key, size)
        if rollout.id not in self._paused:
            self._going.release(rollout.key, size)

    def pause(self, rollout: Rollout) -> None:
        """A rollout is paused; what it has begun counts no more."""
        if rollout.id not in self._paused:
            self._paused.add(rollout.id)
            self._going.release(rollout.key, self._begun[rollout.id])

    def unpause(self, rollout: Rollout) -> None:
        """A rollout goes on."""
        if rollout.id in self._paused:
            self._paused.discard(rollout.id)
            self._going.take(rollout.key, self._begun[rollout.id])

    def forget(self, rollout: Rollout) -> None:
        """A rollout is over, and so are its groups."""
        del self._begun[rollout.id]
        self._paused.discard(rollout.id)
