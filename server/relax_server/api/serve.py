"""`relax serve`: engines, the service, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket

import uvicorn
import uvloop

from relax_sdk.errors import ConfigError, EngineUnavailable
from relax_server.api.app import make_app
from relax_server.api.core import ServiceCore, folder_of
from relax_server.api.door.browsers import HEADERS
from relax_server.api.door.connections import Connections
from relax_server.api.door.limits import connections_allowed
from relax_server.api.ending import Ending
from relax_server.api.logs import log_to_stderr, say
from relax_server.api.metrics import ServiceState
from relax_server.api.settings import ServiceConfig
from relax_server.engines.base import Engine
from relax_server.engines.coalesce import CoalescingEngine
from relax_server.engines.http import HttpEngine
from relax_server.engines.kinds import connect_running
from relax_server.engines.process import EngineProcess
from relax_server.engines.settings import EngineSettings
from relax_server.engines.tokens import forget_tokens, keep_token
from relax_server.garbage import settle
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.rollout.pool import EnginePool

ENGINE_RESTARTS, RESTART_PAUSE = 5, 1.0
CLOSE_SECONDS = 1
"""Seconds for answers that are still being sent when everything has ended."""


class _Server(uvicorn.Server):
    """Leaves the signals to `Ending`."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


def serve(config: ServiceConfig) -> None:
    """Run the service until it is interrupted.

    Raises:
        ConfigError: the port is taken, the folder cannot be used, or it would be open to other machines without a key.
        EngineUnavailable: the engine does not start, or an engine that was named does not answer.
    """
    log_to_stderr(config.log_format, config.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))


async def _serve(config: ServiceConfig) -> None:
    folder, listener = folder_of(config), _listen(config)
    path = resolve_model(config.model)
    say(f"loading the tokenizer of {config.model}")
    processor = await asyncio.to_thread(Processor.load, path)
    process: EngineProcess | None = None
    if not config.engines:
        say("starting an engine")
        process = EngineProcess(
            path, folder / "logs" / "engine.log", EngineSettings(media_root=folder / "media", threads=config.threads)
        )
        await process.start()
        keep_token(process.url, process.token)
    urls, token = (config.engines, config.engine_token) if process is None else ((process.url,), process.token)
    inline = process is None and not config.media_paths
    engines: list[Engine] = [CoalescingEngine(await connect_running(url, token, inline)) for url in urls]
    try:
        for engine in engines:
            if not await engine.health():
                raise EngineUnavailable(f"the engine {engine.url} does not answer; start it, or name another with --engine")
        core = ServiceCore(config, processor, EnginePool(engines))

        async def closing() -> None:
            for engine in {*engines, *core.pool.engines}:
                await engine.close()

        app = make_app(core, closing)
        settings = uvicorn.Config(
            app.asgi,
            log_config=None,
            access_log=False,
            proxy_headers=bool(config.proxies),
            forwarded_allow_ips=list(config.proxies),
            server_header=False,
            headers=HEADERS,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            ws_max_size=config.max_body,
            ws_per_message_deflate=False,
        )
        connections = Connections(config.door, connections_allowed(config.door.connections), config.proxies)
        core.metrics.watch(ServiceState(connections.readings))
        core.metrics.watch(ServiceState(core.refusals.readings))
        server = _Server(connections.configure(settings))
        Ending(core, app.sessions, app.trainings, server, say, lambda: _kill(process)).listen()
        settle()
        host, port = str(listener.getsockname()[0]), int(listener.getsockname()[1])
        near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        core.relay_url = f"ws://{f'[{near}]' if ':' in near else near}:{port}/v1/relay"
        say(f"ready at http://{host}:{port} · {config.model} · {folder} · {await _who_may(core)}")
        watching = asyncio.create_task(_watch(process, core, server)) if process is not None else None
        await server.serve([listener])
        if watching is not None:
            watching.cancel()
    finally:
        if process is not None:
            await process.stop()
            forget_tokens()
    say(f"ended; everything is in {folder}")


async def _who_may(core: ServiceCore) -> str:
    """Who may play, and what to do if nobody may."""
    if core.config.no_keys:
        return "no keys wanted (--no-keys)"
    if not core.locked:
        return "no keys yet"
    if await core.ask(core.keys.any_works):
        return "keys wanted"
    make = f"make one with `relax keys add NAME --folder {core.config.folder}`"
    return f"keys wanted, and all were revoked or have expired: {make}, or start with --no-keys for this machine alone"


async def _watch(process: EngineProcess, core: ServiceCore, server: uvicorn.Server) -> None:
    """Start the engine again when it ends; the pool leaves it out meanwhile."""
    url, restarts = process.url, 0
    while True:
        code = await process.wait()
        restarts += 1
        if restarts > ENGINE_RESTARTS:
            say(f"the engine ended {restarts} times; giving up. {await process.log_tail()}")
            signal.raise_signal(signal.SIGTERM)
            return
        say(f"the engine ended (exit code {code}); starting it again")
        await asyncio.sleep(RESTART_PAUSE)
        await process.start()
        if process.url != url:
            forget_tokens()
            keep_token(process.url, process.token)
            await core.pool.remove(url)
            core.pool.add(CoalescingEngine(HttpEngine(process.url, token=process.token)))
            url = process.url


def _kill(process: EngineProcess | None) -> None:
    """End an engine of ours at once."""
    if process is not None and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def _listen(config: ServiceConfig) -> socket.socket:
    """The socket, bound before anything slow is done.

    Raises:
        ConfigError: taken, or not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        # With the protocol named, asyncio sets TCP_NODELAY; without, streamed tokens wait 40 ms for each other.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
        listener.listen(4096)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {config.host}:{config.port} ({error.strerror}); name another with --port"
        ) from error
    return listener
