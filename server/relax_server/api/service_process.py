"""All that answers requests in one process: the service's parts, its application, and the server in front of it."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Sequence
from typing import cast

import uvicorn

from relax_sdk.errors import EngineUnavailable
from relax_server.api.app import make_app
from relax_server.api.core import ServiceCore
from relax_server.api.door.connections import Connections
from relax_server.api.door.limits import connections_allowed
from relax_server.api.ending import Ending
from relax_server.api.engine_roster import EngineAccess
from relax_server.api.listening import near_address
from relax_server.api.logs import say
from relax_server.api.metrics import ServiceState
from relax_server.api.settings import ServiceConfig
from relax_server.api.workers.handover import Handover, RoutedHttp
from relax_server.api.workers.place import WorkerPlace
from relax_server.garbage import settle
from relax_server.gateway.browsers import HEADERS
from relax_server.models.processor import Processor
from relax_server.rollout.pool import EnginePool

CLOSE_SECONDS = 1
"""Seconds for answers that are still being sent when everything has ended."""


class _Server(uvicorn.Server):
    """Leaves the signals to `Ending`, and says when it listens."""

    listening: Callable[[], object] = staticmethod(lambda: None)

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening()


class ServiceProcess:
    """A service, or one worker of it. Belongs to one event loop.

    Args:
        config: of the service.
        processor: of its model.
        place: among the workers; None: it is the only one.
        kill: called before the process ends at once.
    """

    def __init__(
        self,
        config: ServiceConfig,
        processor: Processor,
        place: WorkerPlace | None = None,
        kill: Callable[[], None] = lambda: None,
    ) -> None:
        self.core = ServiceCore(config, processor, EnginePool([]), place)
        app = make_app(self.core, self._closing)
        self._settings = uvicorn.Config(
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
        self.core.metrics.watch(ServiceState(connections.readings))
        self._handover = None if self.core.place.alone else Handover(self.core.place)
        routed = None if self._handover is None else functools.partial(RoutedHttp, self._handover)
        self._server = _Server(connections.configure(self._settings, routed))
        self.ending = Ending(self.core, app.sessions, app.trainings, self._server, say, kill)

    async def use(self, engines: Sequence[EngineAccess]) -> None:
        """Connect to the engines.

        Raises:
            EngineUnavailable: one does not answer.
        """
        try:
            await self.core.engines.follow(engines)
        except EngineUnavailable:
            await self._closing()
            raise

    async def run(self, listener: socket.socket, ready: Callable[[], object] = lambda: None) -> None:
        """Answer requests until the service is told to end.

        Args:
            listener: where connections come from.
            ready: called when requests are answered.
        """
        settle()
        self.core.envs.others.relay_url = f"ws://{near_address(listener)}/v1/relay"

        def listening() -> None:
            if self._handover is not None:
                self._handover.begin(self._protocol)
            ready()

        self._server.listening = listening
        await self._server.serve([listener])

    async def who_may(self) -> str:
        """Who may play, and what to do if nobody may."""
        core = self.core
        if core.config.no_keys:
            return "no keys wanted (--no-keys)"
        if not core.locked:
            return "no keys yet"
        if await core.ask(core.keys.any_works):
            return "keys wanted"
        make = f"make one with `relax keys add NAME --folder {core.config.folder}`"
        return f"keys wanted, and all were revoked or have expired: {make}, or start with --no-keys for this machine alone"

    def _protocol(self) -> RoutedHttp:
        """The protocol of a connection that another worker gives."""
        server, settings = self._server, self._settings
        make = cast(Callable[..., RoutedHttp], settings.http_protocol_class)
        return make(config=settings, server_state=server.server_state, app_state=server.lifespan.state)

    async def _closing(self) -> None:
        for engine in self.core.pool.engines:
            await engine.close()
