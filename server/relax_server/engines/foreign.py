"""Servers of another Python environment as child processes: started below a keeper, watched until they answer, and ended."""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import relax_server.guard
from relax_sdk.errors import ConfigError, EngineDenied, EngineError, EngineUnavailable
from relax_server.engines.http import HttpEngine
from relax_server.engines.process import ServerProcess
from relax_server.engines.venv import Venv
from relax_server.guard import ADDRESS, TOKEN

KEEPER = Path(__file__).with_name("keeper.py")
GUARD = Path(relax_server.guard.__file__).with_name("inside")
"""Folder of the guard, which these servers import, too."""
MAX_RUNNING = 256
"""Sequences in one batch."""

POLL_SECONDS = 0.25
PORTS = range(20_000, 32_000)
KEYS = ("--api-key", "--admin-api-key")
"""Flags by which SGLang and vLLM take keys: everybody on the machine can read a command line."""


class ForeignProcess(ServerProcess):
    """A server that an interpreter of another environment runs; it and all that it starts end when this process does."""

    venv: ClassVar[Venv]
    stages: ClassVar[Mapping[str, str]]
    """Lines of its log that say how far it is."""

    async def _serve(self, command: Sequence[str], env: Mapping[str, str], url: str, timeout: float) -> None:
        """Start it and wait until it answers; its guard is loaded into it, and tried.

        Raises:
            ConfigError: a key of its own is among its flags.
            EngineUnavailable: it ended or was not ready in time; the message holds the end of its log.
            EngineError: it is running already, or it answers strangers.
        """
        keys = [word for word in self._settings.flags if word.partition("=")[0] in KEYS]
        if keys:
            raise ConfigError(
                f"{keys[0].partition('=')[0]}: everybody on the machine can read a command line; leave it out, as "
                f"{self.venv.name} has its token from `relax engine --token-file` or ${TOKEN}"
            )
        paths = os.pathsep.join([str(GUARD), *filter(None, [env.get("PYTHONPATH")])])
        env = {**env, "PYTHONPATH": paths, TOKEN: self.token, ADDRESS: self._settings.host}
        size = self.log_path.stat().st_size if self.log_path.exists() else 0
        await self._launch([sys.executable, "-S", str(KEEPER), str(os.getpid()), *command], env)
        try:
            await asyncio.wait_for(self._ready(url, size), timeout)
            await self._refuse_strangers(url)
        except TimeoutError:
            await self.stop()
            raise EngineUnavailable(f"{self.venv.name} was not ready within {timeout:g} s\n{await self.log_tail()}") from None
        except BaseException:
            await self.stop()
            raise
        self._url = url

    async def stop(self, timeout: float = 10.0) -> None:
        """Ask it to end, and kill it if it has not after `timeout` seconds."""
        await super().stop(timeout)

    async def _ready(self, url: str, log_from: int) -> None:
        """Wait until it answers; tells `progress` what its log says meanwhile."""
        engine = HttpEngine(url, token=self.token)
        shown = ""
        try:
            while not await engine.health(1.0):
                if not self.alive():
                    code = await self.wait()
                    how = f"ended with exit code {code} before it was ready"
                    raise EngineUnavailable(f"{self.venv.name} {how}\n{await self.log_tail()}")
                stage = await asyncio.to_thread(self._stage, log_from)
                if stage != shown:
                    self._progress(stage)
                    shown = stage
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await engine.close()
        self._progress("ready")

    async def _refuse_strangers(self, url: str) -> None:
        """See that it answers nobody without its token.

        Raises:
            EngineError: it does.
        """
        stranger = HttpEngine(url)
        try:
            await stranger.model_info()
        except EngineDenied:
            return
        finally:
            await stranger.close()
        raise EngineError(
            f"{self.venv.name} at {url} answers without its token, so it was ended: its guard was not loaded; has something "
            f"taken {GUARD} out of its PYTHONPATH?"
        )

    def _stage(self, log_from: int) -> str:
        with self.log_path.open("rb") as log:
            log.seek(log_from)
            text = log.read().decode(errors="replace")
        reached = [what for line, what in self.stages.items() if re.search(line, text)]
        return reached[-1] if reached else f"importing {self.venv.name}"


def take_port(host: str, port: int) -> int:
    """The port that a server is to listen on.

    Args:
        host: the address.
        port: 0 picks one below those that connections take by themselves, as it must stay free until the server is imported.

    Raises:
        ConfigError: somebody listens there already.
        EngineError: no free one was found.
    """
    if port:
        if not _free(host, port):
            raise ConfigError(f"port {port} of {host} is in use; name another one, or 0 to have a free one picked")
        return port
    for candidate in random.sample(PORTS, 64):
        if _free("127.0.0.1", candidate):
            return candidate
    raise EngineError(f"no free port among 64 tried between {PORTS.start} and {PORTS.stop}; name one")


def _free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
