"""An orderly end: the first signal drains the service, a second one ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable

import uvicorn

from relax_sdk.errors import RelaxError
from relax_server.api.core import ServiceCore
from relax_server.api.sessions import SessionHub
from relax_server.api.trainings.hub import TrainingHub

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK_SECONDS, SAY_SECONDS = 0.1, 1.0
"""Seconds between two looks at what is under way, and between two lines about it."""
TELL_SECONDS = 1.0
"""Seconds for those who follow them to hear of it."""
LAST_SECONDS = 5.0
"""Seconds after draining for everything else; then the process ends whatever hangs."""
WHY = "the service was shut down before it ended"


class Ending:
    """Drains a service when it is told to end. Belongs to one event loop.

    While it drains no episode begins, training runs save a checkpoint and end, and what is under way may go on for a while.
    What is left then is cancelled, with its trajectory kept; rollouts and runs go on where they were when the service is
    started again. The process ends `LAST_SECONDS` after draining whatever hangs.

    Args:
        core: of the service.
        hub: its sessions.
        trainings: its training runs.
        server: that answers until nothing is left.
        say: tells people about it.
        kill: called before the process ends at once.
    """

    def __init__(
        self,
        core: ServiceCore,
        hub: SessionHub,
        trainings: TrainingHub,
        server: uvicorn.Server,
        say: Callable[[str], None],
        kill: Callable[[], None],
    ) -> None:
        self.core, self.hub, self.trainings, self.server = core, hub, trainings, server
        self._say, self._kill = say, kill
        self._draining: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Take the signals of this process over."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.told, number)

    def told(self, number: int) -> None:
        """A signal came."""
        if self._draining is not None:
            self._say("ending at once; what was under way is lost, what is durable stays")
            self._kill()
            os._exit(128 + number)
        self._draining = asyncio.get_running_loop().create_task(self._drain(number))
        self._end_later(number)

    def _end_later(self, number: int) -> None:
        """End the process when its time is over, by a thread, as the event loop may be what hangs."""
        seconds = self.core.config.drain_seconds + LAST_SECONDS

        def end() -> None:
            self._say(f"not ended within {seconds:g} s; ending now, what is durable stays")
            self._kill()
            os._exit(128 + number)

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()

    async def _drain(self, number: int) -> None:
        core, seconds = self.core, self.core.config.drain_seconds
        core.draining = True
        core.admission.clear()
        self.trainings.interrupt()
        for session in self.hub.unfinished:
            core.events.add(session.topic, "draining", seconds=seconds)
        try:
            await self._wait(seconds)
            await self._cancel()
        finally:
            self.server.handle_exit(number, None)

    async def _wait(self, seconds: float) -> None:
        """Wait until nothing is under way, and say what is."""
        clock = asyncio.get_running_loop().time
        end, next_line = clock() + seconds, clock()
        while (playing := self.core.slots.running.total()) and (left := end - clock()) > 0:
            if clock() >= next_line:
                open_ = self.hub.open_count
                self._say(
                    f"draining: {open_} sessions are open, {max(playing - open_, 0)} episodes of rollouts under way, "
                    f"{left:.0f} s left; once more to end at once"
                )
                next_line += SAY_SECONDS
            await asyncio.sleep(min(LOOK_SECONDS, left))

    async def _cancel(self) -> None:
        """End what is left; its clients are told why."""
        left = self.hub.unfinished
        if left:
            self._say(f"drained for {self.core.config.drain_seconds:g} s: cancelling {len(left)} sessions")
        await self.hub.drain(WHY)
        with contextlib.suppress(RelaxError, TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                await self.core.events.flush()
                while any(self.core.events.followed(session.topic) for session in left):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_SECONDS)
