"""`relax serve`: engines, the service, and an orderly end."""

from __future__ import annotations

import asyncio
import importlib
import signal
from collections.abc import Sequence

import uvloop

from relax_server.api.core import folder_of
from relax_server.api.engine_roster import named_engines
from relax_server.api.listening import address, listen
from relax_server.api.logs import log_to_stderr, say
from relax_server.api.own_engine import OwnEngine
from relax_server.api.service_process import ServiceProcess
from relax_server.api.settings import ServiceConfig
from relax_server.api.workers.supervisor import Supervisor
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor


def serve(config: ServiceConfig, modules: Sequence[str] = ()) -> None:
    """Run the service until it is interrupted.

    Args:
        config: its settings.
        modules: imported first, by every worker; they may register environments.

    Raises:
        ConfigError: the port is taken, the folder cannot be used, or it would be open to other machines without a key.
        EngineUnavailable: the engine does not start, or an engine that was named does not answer.
        RelaxError: a worker does not start.
    """
    log_to_stderr(config.log_format, config.log_level)
    if config.workers > 1:
        asyncio.run(Supervisor(config, modules).run())
        return
    for module in modules:
        importlib.import_module(module)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))


async def _serve(config: ServiceConfig) -> None:
    folder, listener = folder_of(config), listen(config)
    path = resolve_model(config.model)
    say(f"loading the tokenizer of {config.model}")
    processor = await asyncio.to_thread(Processor.load, path)
    own: OwnEngine | None = None
    engines = named_engines(config)
    if not engines:
        say("starting an engine")
        own = OwnEngine(config)
        engines = (await own.start(),)
    try:
        service = ServiceProcess(config, processor, kill=own.kill if own is not None else lambda: None)
        await service.use(engines)
        service.ending.listen()
        say(f"ready at {address(listener)} · {config.model} · {folder} · {await service.who_may()}")
        watching = None
        if own is not None:
            give_up = lambda: signal.raise_signal(signal.SIGTERM)
            watching = asyncio.create_task(own.watch(service.core.engines.replace, give_up))
        await service.run(listener)
        if watching is not None:
            watching.cancel()
    finally:
        if own is not None:
            await own.stop()
    say(f"ended; everything is in {folder}")
