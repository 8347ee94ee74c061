"""Engines as child processes: started, watched and stopped."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from relax_sdk.errors import EngineError, EngineUnavailable
from relax_server.engines.settings import EngineSettings
from relax_server.guard import TOKEN
from relax_server.log_tail import log_tail

MAX_RUNNING = 512
"""Sequences in one batch of the embedded engine."""

TAIL = 40
"""Lines of the log shown when a start fails."""


class ServerProcess:
    """A server that answers under one URL; it ends when this process does.

    Args:
        model_path: a model folder or a built-in name.
        log_path: where its output goes (appended).
        settings: how it is started.
        progress: told what it is doing while it starts, if that takes long.
    """

    def __init__(
        self,
        model_path: str | Path,
        log_path: str | Path,
        settings: EngineSettings | None = None,
        progress: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.log_path = Path(log_path)
        self._model, self._settings, self._progress = str(model_path), settings or EngineSettings(), progress
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""
        self.host = platform.node()
        """Name of the machine that it is on."""

    @property
    def url(self) -> str:
        """The address at which it answers.

        Raises:
            EngineError: it was not started.
        """
        if not self._url:
            raise EngineError("the engine process was not started; await start() first")
        return self._url

    @property
    def token(self) -> str:
        """What it wants to be shown with every call."""
        return self._settings.token

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """None while it runs or before it was started."""
        return self._process.returncode if self._process else None

    def alive(self) -> bool:
        """Whether the process exists; `HttpEngine.health` tells whether it answers."""
        return self._process is not None and self._process.returncode is None

    async def start(self, timeout: float = 120.0) -> None:
        """Start it and wait until it answers requests.

        Raises:
            EngineUnavailable: it ended or was not ready in time; the message holds the end of its log.
            EngineError: it is running already.
        """
        raise NotImplementedError

    async def _launch(self, command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int] = ()) -> None:
        """Start the child in a session of its own, its output going to the log.

        Raises:
            EngineError: it is running already.
        """
        if self.alive():
            raise EngineError(f"the engine process {self.pid} is running already")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(env),
                pass_fds=tuple(pass_fds),
                start_new_session=True,
            )

    async def stop(self, timeout: float = 5.0) -> None:
        """Ask it to end, and kill it if it has not after `timeout` seconds."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        if self._process is None:
            raise EngineError("the engine process was not started")
        return await self._process.wait()

    async def log_tail(self) -> str:
        """The end of its log."""
        return f"end of {self.log_path}:\n{await log_tail(self.log_path, TAIL)}"


class EngineProcess(ServerProcess):
    """One `python -m relax_server.engines.embedded`; it ends when this process does."""

    def _arguments(self) -> list[str]:
        given = self._settings
        arguments = ["--model-path", self._model, "--threads", str(given.threads), "--host", given.host]
        arguments += ["--port", str(given.port), "--dtype", given.dtype, "--weight-version", str(given.weight_version)]
        arguments += ["--max-running", str(given.max_running or MAX_RUNNING)]
        optional = {"media-root": given.media_root, "max-total-tokens": given.max_total_tokens}
        optional |= {"features": given.features, "timeline": given.timeline}
        for name, value in optional.items():
            if value is not None:
                arguments += [f"--{name}", str(value)]
        return [*arguments, "--return-routed-experts"] if given.return_routed_experts else arguments

    async def start(self, timeout: float = 120.0) -> None:
        """Start it and wait until it answers requests.

        Raises:
            EngineUnavailable: it ended or was not ready in time; the message holds the end of its log.
            EngineError: it is running already.
        """
        reader, writer = os.pipe()
        threads = str(self._settings.threads)
        command = [sys.executable, "-m", "relax_server.engines.embedded", *self._arguments()]
        limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        command += ["--ready-file", f"/dev/fd/{writer}", "--parent-pid", str(os.getpid())]
        try:
            env = {**os.environ, **limits, **self._settings.env, TOKEN: self.token}
            await self._launch(command, env, [writer])
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        try:
            self._url = (await asyncio.wait_for(_read_line(reader), timeout)).strip()
        except TimeoutError:
            await self.stop()
            raise EngineUnavailable(f"the engine was not ready within {timeout:g} s\n{await self.log_tail()}") from None
        except asyncio.CancelledError:
            await self.stop()
            raise
        if not self._url:
            code = await asyncio.wait_for(self.wait(), 10)
            raise EngineUnavailable(f"the engine ended with exit code {code} before it was ready\n{await self.log_tail()}")


async def _read_line(descriptor: int) -> str:
    """Read a line from a pipe; empty where its other end was closed before."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", 0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return (await reader.readline()).decode()
    finally:
        transport.close()
