"""The engine that a service starts for itself where none is named."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable

from relax_sdk.errors import EngineUnavailable
from relax_server.api.engine_roster import EngineAccess
from relax_server.api.logs import say
from relax_server.api.settings import ServiceConfig
from relax_server.engines.process import EngineProcess
from relax_server.engines.settings import EngineSettings
from relax_server.engines.tokens import forget_tokens, keep_token
from relax_server.models.catalog import resolve_model

ENGINE_RESTARTS, RESTART_PAUSE = 5, 1.0


class OwnEngine:
    """An embedded engine, started again when it ends; it ends with this process.

    Args:
        config: of the service.
    """

    def __init__(self, config: ServiceConfig) -> None:
        settings = EngineSettings(media_root=config.folder / "media", threads=config.threads)
        self._process = EngineProcess(resolve_model(config.model), config.folder / "logs" / "engine.log", settings)

    async def start(self) -> EngineAccess:
        """Start it and wait until it answers.

        Raises:
            EngineUnavailable: it ended or was not ready in time.
        """
        await self._process.start()
        keep_token(self._process.url, self._process.token)
        return EngineAccess(self._process.url, self._process.token, inline=False)

    async def watch(self, moved: Callable[[str, EngineAccess], Awaitable[None]], give_up: Callable[[], object]) -> None:
        """Start it again when it ends; the pools leave it out meanwhile.

        Args:
            moved: told its old URL, and how it is reached now, if that has changed.
            give_up: called when it has ended too often.
        """
        url, runs = self._process.url, True
        for _ in range(ENGINE_RESTARTS):
            if runs:
                say(f"the engine ended (exit code {await self._process.wait()}); starting it again")
            await asyncio.sleep(RESTART_PAUSE)
            forget_tokens()
            try:
                access = await self.start()
                if access.url != url:
                    await moved(url, access)
                    url = access.url
                runs = True
            except EngineUnavailable as error:
                say(f"the engine does not start: {error}")
                await self._process.stop()
                runs = False
        if runs:
            await self._process.wait()
        say(f"the engine ended or did not start {ENGINE_RESTARTS + 1} times; giving up. {await self._process.log_tail()}")
        give_up()

    def kill(self) -> None:
        """End it at once."""
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End it."""
        await self._process.stop()
        forget_tokens()
