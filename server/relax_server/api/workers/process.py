"""One worker of a service: `python -m relax_server.api.workers.process`; told on standard input what to do.

It leaves signals to the process that started it, which tells it when to end: a terminal or a supervisor of services sends them
to all processes of a service at once. When that process is gone, the system kills it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import pickle
import signal
import socket
import sys

import orjson
import uvloop

from relax_sdk.errors import RelaxError
from relax_server.api.ending import SIGNALS
from relax_server.api.logs import log_to_stderr
from relax_server.api.private import write_for_this_user_alone
from relax_server.api.service_process import ServiceProcess
from relax_server.api.workers.board import Board
from relax_server.api.workers.channel import SUPERVISOR, Channel
from relax_server.api.workers.place import WorkerPlace
from relax_server.api.workers.setup import WorkerSetup
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Do what standard input says."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: None)  # not ignored, which the processes that it starts would inherit
    setup: WorkerSetup = pickle.load(sys.stdin.buffer)
    _die_with(setup.parent)
    write_for_this_user_alone()
    log_to_stderr(setup.config.log_format, setup.config.log_level, setup.index)
    outboxes = {number: socket.socket(fileno=file) for number, file in setup.outboxes.items()}
    channel = Channel(setup.index, socket.socket(fileno=setup.inbox), outboxes)
    try:
        for module in setup.modules:
            importlib.import_module(module)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_work(setup, channel))
    except RelaxError as error:
        channel.send(SUPERVISOR, "failed", orjson.dumps({"why": str(error)}))
        sys.exit(1)


async def _work(setup: WorkerSetup, channel: Channel) -> None:
    place = WorkerPlace(setup.index, setup.config.workers, channel, Board(setup.board))
    processor = await asyncio.to_thread(Processor.load, resolve_model(setup.config.model))
    service = ServiceProcess(setup.config, processor, place)
    place.on("signal", lambda message: service.ending.told(message.body["number"]))
    await service.use(setup.engines)
    who = await service.who_may()
    channel.listen()
    await service.run(socket.socket(fileno=setup.listener), lambda: place.tell(SUPERVISOR, "ready", who=who))
    channel.close()


def _die_with(parent: int) -> None:
    """End when that process does, however it does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
