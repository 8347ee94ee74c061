"""Pausing the whole service, in all its workers."""

from __future__ import annotations

from relax_server.api.core import ServiceCore
from relax_server.api.rollouts import RolloutHub
from relax_server.api.sessions import SessionHub

PAUSE = "pause"


class ServicePause:
    """Whether the service is paused; worker 0 decides, and the board tells workers that are started meanwhile.

    Args:
        core: of this worker.
        hub: its sessions.
        rollouts: its rollouts.
    """

    def __init__(self, core: ServiceCore, hub: SessionHub, rollouts: RolloutHub) -> None:
        self._core, self._hub, self._rollouts = core, hub, rollouts
        core.place.on(PAUSE, lambda message: self._look())
        self._look()

    async def set(self, paused: bool) -> None:
        """Pause the service, or let it go on; returns when all workers do."""
        self._core.place.board.paused = paused
        self._look()
        await self._core.place.ask_others(PAUSE)

    def _look(self) -> None:
        """Do as the board says, and tell everybody who follows something that it concerns."""
        core, paused = self._core, self._core.place.board.paused
        if core.gate.is_set() is not paused:
            return
        if paused:
            core.gate.clear()
        else:
            core.gate.set()
        for topic in [session.topic for session in self._hub.unfinished] + self._rollouts.topics:
            core.events.add(topic, "paused" if paused else "resumed", by="service")
