"""Runs one engine until it is told to end, and starts it again whenever it is lost."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from relax_sdk.errors import EngineUnavailable
from relax_server.engines.http import HttpEngine
from relax_server.engines.process import ServerProcess
from relax_server.engines.tokens import forget_tokens, keep_token

HEALTH_SECONDS = 5.0
"""Seconds between looks at it."""

MAX_MISSES = 12
"""Looks in a row at which it did not answer before it is started again."""

LONG = 600.0
"""Seconds; an end after so long does not count with those before it."""

PAUSE = 1.0


async def supervise(process: ServerProcess, name: str, start_seconds: float, restarts: int, say: Callable[[str], None]) -> None:
    """Start an engine, and again whenever it ends or does not answer, until SIGINT or SIGTERM.

    It begins with the weights it is started from; whoever updates them has to do so again after a restart. Its token is
    kept where this user's other programs find it.

    Args:
        process: not started yet.
        name: for what is said.
        start_seconds: until it answers, at most.
        restarts: ends in a row, each within `LONG`, after which it is given up.
        say: told where it answers, and what was mended.

    Raises:
        ConfigError: it cannot be started as it is configured, or its token cannot be kept.
        EngineUnavailable: it does not start, or was lost too often.
    """
    task = asyncio.current_task()
    assert task is not None
    told: list[int] = []

    def end(number: int) -> None:
        told.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end, number)
    try:
        await _run(process, name, start_seconds, restarts, say)
    except asyncio.CancelledError:
        if not told:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await process.stop()
        forget_tokens()
    say(f"{name}: ended")


async def _run(process: ServerProcess, name: str, start_seconds: float, restarts: int, say: Callable[[str], None]) -> None:
    lost = 0
    while True:
        await process.start(start_seconds)
        began = time.monotonic()
        kept = keep_token(process.url, process.token)
        say(f"{name}: ready at {process.url}; its token is in {kept}; Ctrl-C ends it")
        why = await _lost(process)
        await process.stop()
        forget_tokens()
        lost = 1 if time.monotonic() - began > LONG else lost + 1
        if lost > restarts:
            raise EngineUnavailable(f"{name}: {why}, for the {lost}th time; giving up\n{await process.log_tail()}")
        say(f"{name}: {why}; starting it again")
        await asyncio.sleep(PAUSE)


async def _lost(process: ServerProcess) -> str:
    """Wait until it ended or no longer answers; which of them."""
    client, misses = HttpEngine(process.url, token=process.token), 0
    try:
        while True:
            try:
                return f"it ended with exit code {await asyncio.wait_for(process.wait(), HEALTH_SECONDS)}"
            except TimeoutError:
                misses = 0 if await client.health() else misses + 1
            if misses >= MAX_MISSES:
                return f"it has not answered for {misses * HEALTH_SECONDS:g} s"
    finally:
        await client.close()
