"""Pausing: while a gate is closed no new episode begins and no model call is sent; what is under way ends."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Gate:
    """Open, unless it or what it is part of was closed. It takes the place of an `asyncio.Event`.

    Args:
        outer: what it is part of.
    """

    def __init__(self, *outer: Gate) -> None:
        self._outer = outer
        self._open = asyncio.Event()
        self._open.set()

    def is_set(self) -> bool:
        """Whether it and all that it is part of are open."""
        return self._open.is_set() and all(gate.is_set() for gate in self._outer)

    def set(self) -> None:
        """Open it."""
        self._open.set()

    def clear(self) -> None:
        """Close it."""
        self._open.clear()

    async def wait(self) -> None:
        """Wait until it and all that it is part of are open."""
        while not self.is_set():
            await self._open.wait()
            for gate in self._outer:
                await gate.wait()


class Slots(Protocol):
    """Places for episodes."""

    async def acquire(self) -> None:
        """Wait for a place."""
        ...

    def release(self) -> None:
        """Give it back."""
        ...


class GatedSlots:
    """Places that are given out only while a gate is open; an episode's clock starts when it has one.

    Args:
        slots: the places.
        gate: that they are behind.
    """

    def __init__(self, slots: Slots, gate: Gate) -> None:
        self._slots, self._gate = slots, gate

    async def acquire(self) -> None:
        """Wait for an open gate and a place."""
        while True:
            await self._gate.wait()
            await self._slots.acquire()
            if self._gate.is_set():
                return
            self._slots.release()  # it was closed while this one stood in line

    def release(self) -> None:
        """Give a place back."""
        self._slots.release()
