"""`MediaDecoders`: the processes that media of strangers are decoded in, and whose turn it is."""

from __future__ import annotations

from collections import Counter

from relax_sdk.media_formats import Kind
from relax_sdk.probing import MediaRef
from relax_server.api.media.limits import DecoderLimits
from relax_server.api.media.process import END_SECONDS, START_SECONDS, DecoderProcess
from relax_server.api.quotas import FairSlots, KeyMeter
from relax_server.gateway.errors import ApiError
from relax_server.rollout.threads import CallThreads

CALL_SECONDS = START_SECONDS + 2 * END_SECONDS
"""Seconds that a call may take beside those that its item may."""


class MediaDecoders:
    """A few processes, started when they are needed, and again after one has ended. Belongs to one event loop.

    A key may have all but one of them at a time, so that another's item never waits for more than the one before it.

    Args:
        limits: of each, and their number.
    """

    def __init__(self, limits: DecoderLimits) -> None:
        self.limits = limits
        self.killed = 0
        """Processes that have died of an item, or were killed because of one."""
        self._threads = CallThreads("media decoder", limits.processes)
        self._slots = FairSlots(limits.processes)
        self._asked: Counter[str] = Counter()
        """Bytes under way, by key."""
        self._idle: list[DecoderProcess] = []
        self._busy: set[DecoderProcess] = set()

    async def check(self, kind: Kind, data: bytes, owner: str, meter: KeyMeter | None = None) -> MediaRef:
        """Read an item's header and decode it, in a process.

        Args:
            kind: what it is to be.
            data: encoded.
            owner: id of the key that it came with.
            meter: is charged for the seconds of a processor that it takes, whatever becomes of it; None: nobody is.

        Raises:
            MediaError: refused, or its decoder hung, crashed or used too much.
            ApiError: too many items of this key wait already, or its seconds are used up (429), or no process can be started
                (503).
        """
        if self._asked[owner] + len(data) > self.limits.waiting:
            message = f"{self._asked[owner]:,} bytes of media of this key wait to be decoded; allowed: {self.limits.waiting:,}"
            raise ApiError(429, f"{message}; try again when some are", "too_many_media", headers={"Retry-After": "1"})
        self._asked[owner] += len(data)
        try:
            slots = self._slots.of(owner, self.limits.processes - 1)
            await slots.acquire()
            try:
                return await self._check(kind, data, meter)
            finally:
                slots.release()
        finally:
            self._asked[owner] -= len(data)
            if not self._asked[owner]:
                del self._asked[owner]

    def close(self) -> None:
        """End all processes."""
        for process in self._idle:
            process.end()
        for process in self._busy:
            process.kill()
        self._threads.close()

    async def _check(self, kind: Kind, data: bytes, meter: KeyMeter | None) -> MediaRef:
        most = self.limits.cpu_seconds
        if meter is not None:
            await meter.reserve(most)
        process = self._idle.pop() if self._idle else DecoderProcess(self.limits)
        if not process.usable:  # it has died since, or was used long enough
            process.kill()
            process = DecoderProcess(self.limits)
        self._busy.add(process)
        process.busy, process.spent = True, 0.0
        try:
            return await self._threads.call(process.check, kind, data, limit=CALL_SECONDS + self.limits.seconds)
        finally:
            if process.busy:
                process.count()  # nobody waits for it any more, or it hangs
            if meter is not None:
                meter.give_back(most - process.spent)
            self._busy.discard(process)
            if process.usable:
                self._idle.append(process)
            else:
                self.killed += process.ended or process.busy
                process.kill()
