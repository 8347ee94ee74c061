"""The controller as a role: in the program's place it is told of the run by messages, and tells how it goes."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

from relax_sdk.errors import RelaxError
from relax_server.roles.channel import Outlet
from relax_server.roles.launch import Launch
from relax_server.roles.messages import Beat, RunEnded, Stage, StartController, StepShown, Stop, Warn

BEAT_SECONDS = 1.0


class Teller:
    """An observer whose ears are elsewhere."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet

    def stage(self, text: str) -> None:
        self._outlet.send(Stage(text))

    def step(self, metrics: dict[str, Any]) -> None:
        self._outlet.send(StepShown(metrics))

    def warn(self, text: str) -> None:
        self._outlet.send(Warn(text))


def run_controller(outlet: Outlet, inbox: queue.SimpleQueue[Any], first: StartController) -> None:
    """Carry the run out; a `Stop` ends it with what can be kept, a second one at once."""
    asyncio.run(_run(outlet, inbox, first))


async def _run(outlet: Outlet, inbox: queue.SimpleQueue[Any], first: StartController) -> None:
    loop = asyncio.get_running_loop()
    beat = asyncio.create_task(_beat(outlet))
    error: RelaxError | None = None
    try:
        launch = Launch(first.job, Teller(outlet), first.placement, first.restarted)

        def forward() -> None:
            at_once = False
            while True:
                if isinstance(inbox.get(), Stop) and not loop.is_closed():
                    loop.call_soon_threadsafe(launch.request_stop, at_once)
                    at_once = True

        threading.Thread(target=forward, name="inbox", daemon=True).start()
        await launch.run()
    except RelaxError as ended:
        error = ended
    finally:
        beat.cancel()
    outlet.send(RunEnded(error))


async def _beat(outlet: Outlet) -> None:
    """Say once a second that this process is well."""
    while True:
        outlet.send(Beat(waiting=False))
        await asyncio.sleep(BEAT_SECONDS)
