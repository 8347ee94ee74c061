"""The weights that all engines of a run are to have: loaded, checked, and taken away with the engines' memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from relax_sdk.errors import EngineError, EngineFaulty, EngineUnavailable
from relax_server.roles.slot import EngineSlot


class FleetWeights:
    """Which weights are the current ones, and how an engine comes to them.

    Args:
        slots: finds the engines in any of these states.
        lost: told of an engine that could not be brought to them, or could not give its memory back, and why.
    """

    def __init__(self, slots: Callable[..., list[EngineSlot]], lost: Callable[[EngineSlot, str], None]) -> None:
        self._slots, self._lost = slots, lost
        self._folder: Path | None = None
        self._loads = 0
        self._turn = asyncio.Lock()
        """Held while weights are loaded or memory is given back: the engines that do so stay the same ones."""
        self._released = False
        self.version = 0
        """Version of the current weights."""

    async def load(self, folder: Path, version: int) -> None:
        """These are the current weights now; every engine is brought to them.

        An engine that is just joining sees that there are others, and loads them before it is used.
        """
        async with self._turn:
            self._folder, self.version, self._released = folder, version, False
            self._loads += 1
            await asyncio.gather(
                *(self._load_into(slot, folder) for slot in self._slots("current", "draining") if slot.started)
            )

    async def _load_into(self, slot: EngineSlot, folder: Path) -> None:
        try:
            await self._give(slot, folder, self.version)
        except EngineError as error:
            if slot.state == "current":
                self._lost(slot, f"could not load version {self.version}: {error}")

    async def _give(self, slot: EngineSlot, folder: Path, version: int) -> None:
        if slot.released:
            await slot.client.resume_memory()
        await slot.update_weights(folder, version)
        if slot.released:
            await slot.client.resume()
            slot.released = False

    async def let_in(self, slot: EngineSlot) -> None:
        """Give an engine that has just started the current weights, also if they become others meanwhile; then it is current.

        Its first load takes long and holds up nobody. If there are other weights after it, they are loaded while the next ones
        wait, so that an engine that needs longer than a training step joins, too.

        Raises:
            EngineError: it cannot be had, or holds others after all.
        """
        given, folder, version = self._loads, self._folder, self.version
        if folder is not None:  # otherwise the run begins; `load` comes
            try:
                await self._give_checked(slot, folder, version)
            except EngineUnavailable:
                raise
            except EngineError:
                if given == self._loads:
                    raise
                given = -1  # the files were taken away for newer ones
        async with self._turn:
            if self._folder is not None:
                if given != self._loads:
                    await self._give_checked(slot, self._folder, self.version)
                if self._released:
                    await self._release(slot)
            slot.state, slot.reason, slot.misses, slot.pause = "current", "", 0, 0.0

    async def _give_checked(self, slot: EngineSlot, folder: Path, version: int) -> None:
        """Load weights into an engine, and ask it which it has.

        Raises:
            EngineError: it did not load them.
        """
        await self._give(slot, folder, version)
        stated = str((await slot.client.model_info()).get("weight_version"))
        if stated != str(version):
            raise EngineFaulty(f"{slot.url} says that it has weights of version {stated} after it loaded {version}")

    async def release(self) -> None:
        """Colocate: the engines give their memory back until the next `load`."""
        async with self._turn:
            self._released = True
            for slot in self._slots("current"):
                try:
                    await self._release(slot)
                except EngineError as error:
                    self._lost(slot, f"did not give its memory back: {error}")

    async def _release(self, slot: EngineSlot) -> None:
        await slot.client.pause("abort")  # all that can be in flight is a call that nobody waits for any more
        await slot.client.release_memory()
        slot.released = True
