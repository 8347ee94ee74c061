"""The Ray actors: a role, or the process of an engine, on the node where Ray has put them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray

from relax_sdk.config import EngineKind
from relax_sdk.errors import ConfigError
from relax_sdk.runtime import silent
from relax_server.engines.kinds import process_of
from relax_server.engines.settings import EngineSettings
from relax_server.roles.channel import pack, unpack
from relax_server.roles.child import run_role
from relax_server.roles.messages import Ended, Failed, Started


class RoleActor:
    """Runs one role in a thread; its messages are the items of `serve`.

    Args:
        role: its name.
        several_machines: roles of the run may be on other machines than this one.
    """

    def __init__(self, role: str, several_machines: bool) -> None:
        self.role = role
        if several_machines and (interface := interface_of(ray.util.get_node_ip_address())):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def serve(self, first: bytes, log: Path, needed: Sequence[Path]) -> Iterator[bytes]:
        """Run the role to its end.

        Args:
            first: its first message.
            log: where its output goes (appended).
            needed: what must be there, on this node too.

        Yields:
            Its messages, from `Started` to `Ended`.
        """
        yield pack(Started(os.getpid(), platform.node()))
        try:
            check_visible(needed, self.role)
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
        except (ConfigError, OSError) as error:
            yield pack(Failed(str(error), fatal=True))
            yield pack(Ended(1))
            return
        threading.Thread(target=self._run, args=(first,), name=self.role, daemon=True).start()
        while (item := self._outbox.get()) is not None:
            yield item

    @ray.method(concurrency_group="control")
    def put(self, message: bytes) -> None:
        """A message to the role."""
        self._inbox.put(unpack(message))

    def send(self, message: Any) -> None:
        """A message from the role."""
        self._outbox.put(pack(message))

    def _run(self, first: bytes) -> None:
        well = False
        try:
            well = run_role(self.role, self, self._inbox, unpack(first))
        finally:
            self.send(Ended(0 if well else 1))
            self._outbox.put(None)


class EngineActor:
    """Starts an engine on its node and watches it; the engine ends when this actor does.

    Args:
        kind: what is to run.
        model_path: of the model to serve.
        log_path: where its output goes.
        settings: of its process.
        needed: what must be there, on this node too.
        reachable: from other machines.
        tells: its process says how far it is while it starts.
    """

    def __init__(
        self,
        kind: EngineKind,
        model_path: Path,
        log_path: Path,
        settings: EngineSettings,
        needed: Sequence[Path],
        reachable: bool,
        tells: bool,
    ) -> None:
        self._told: asyncio.Queue[str | None] = asyncio.Queue()
        if reachable:
            settings = dataclasses.replace(settings, host=ray.util.get_node_ip_address())
        self._process = process_of(kind, model_path, log_path, settings, self._told.put_nowait if tells else silent)
        self._needed = [model_path, *needed]

    async def start(self, timeout: float) -> tuple[str, int | None, str]:
        """Start it and wait until it answers.

        Returns:
            Its URL and process id.

        Raises:
            ConfigError: this node does not see what it needs.
            EngineUnavailable: it ended or was not ready in time.
        """
        try:
            check_visible(self._needed, "engine")
            await self._process.start(timeout)
        finally:
            self._told.put_nowait(None)
        return self._process.url, self._process.pid, self._process.host

    async def progress(self) -> AsyncIterator[str]:
        """Yields what the engine is doing, until it is started."""
        while (told := await self._told.get()) is not None:
            yield told

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await self._process.wait()

    async def stop(self) -> None:
        await self._process.stop()


def check_visible(paths: Sequence[Path], role: str) -> None:
    """Refuse a node that does not share the run's folders.

    Raises:
        ConfigError: one of them is not there.
    """
    missing = [str(path) for path in paths if not _exists(path)]
    if missing:
        raise ConfigError(
            f"the {role} was put on node {ray.util.get_node_ip_address()}, which does not see {', '.join(missing)}; "
            f"keep runs and models on a file system that all nodes mount at the same path"
        )


def interface_of(address: str) -> str | None:
    """The network interface that has an address; None where no interface has it.

    Trainer processes on several machines must be told it: by itself, gloo takes the address of the machine's name, which is a
    loopback address on many Linux distributions, so that the other machines wait for it in vain.

    Args:
        address: by which the other machines know this one.
    """
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces if any(one.address == address for one in found)), None)


def _exists(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.exists()
    return False
