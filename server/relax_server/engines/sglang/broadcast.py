"""Weights for SGLang servers on other machines: a process group of the trainer and the server's ranks."""

from __future__ import annotations

import asyncio
import socket
import threading
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d as c10d

from relax_sdk.errors import EngineError, EngineUnavailable
from relax_server.engines.http import HttpEngine
from relax_server.engines.sglang.client import SglangEngine

LEAVE_SECONDS = 5.0
"""For a server to leave a group; one that has ended leaves none."""


class WeightGroup:
    """Broadcasts weights to one server, which may use several ranks.

    The group is beside the trainer's own: torch has public calls for subgroups of one world only, so it is made as
    `torch.distributed.init_process_group` makes the world.

    Args:
        engine: the server.
        address: of this machine, as the server reaches it.
        backend: `gloo` for tensors on CPUs, `nccl` for those on GPUs.
        timeout: seconds for the meeting and for each weight.
    """

    def __init__(
        self,
        engine: SglangEngine,
        address: str = "127.0.0.1",
        backend: Literal["gloo", "nccl"] = "gloo",
        timeout: float = 120.0,
    ) -> None:
        self.engine, self.address, self.backend, self.timeout = engine, address, backend, timeout
        self.name = f"relax-{uuid.uuid4().hex[:8]}"
        self._group: Any = None
        self._store: Any = None
        self._in_use = threading.Lock()
        """Held while weights are sent."""

    @classmethod
    def with_engine(cls, engine: HttpEngine) -> WeightGroup:
        """A group with a server wherever it runs: this machine's address is that from which it is reached.

        Raises:
            EngineError: the server is not SGLang, or there is no way to it.
        """
        if not isinstance(engine, SglangEngine):
            raise EngineError(f"{engine.url} is not SGLang, which alone takes weights by broadcast")
        place = urlsplit(engine.url)
        try:
            family, _, _, _, there = socket.getaddrinfo(place.hostname, place.port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as way:  # nothing is sent
                way.connect(there)
                return cls(engine, way.getsockname()[0])
        except OSError as error:
            raise EngineUnavailable(f"no way to {engine.url} ({error})") from error

    async def open(self) -> None:
        """Meet the server's ranks.

        Raises:
            EngineUnavailable: they did not come in time.
            EngineError: the server refused, or the group is open.
        """
        if self._group is not None:
            raise EngineError(f"the group with {self.engine.url} is open already")
        world = 1 + await self.engine.ranks()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        theirs = self.engine.join_group(self.name, self.address, port, world, self.backend)
        try:
            async with asyncio.timeout(self.timeout):
                _, self._group = await asyncio.gather(theirs, asyncio.to_thread(self._join, port, world))
        except (TimeoutError, dist.DistError) as error:
            raise EngineUnavailable(f"no process group with {self.engine.url} at {self.address}:{port}: {error!r}") from error

    def _join(self, port: int, world: int) -> Any:
        timeout = timedelta(seconds=self.timeout)
        self._store = TCPStore(self.address, port, world, is_master=True, timeout=timeout)
        store = PrefixStore(self.name, self._store)
        group, _ = c10d._new_process_group_helper(
            world, 0, [], dist.Backend(self.backend), store, group_name=c10d.GroupName(self.name), timeout=timeout
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
        return group

    async def update(self, tensors: Mapping[str, torch.Tensor], version: int, flush_cache: bool = True) -> None:
        """Broadcast all weights; generation waits meanwhile, as in `SglangEngine.update_weights`.

        Args:
            tensors: by the names of the model's folder, on the backend's device.
            version: of these weights.
            flush_cache: forget what was computed with the old ones.

        Raises:
            EngineError: names or shapes differ from the model's, the group is not open, or SGLang could not load them.
            EngineUnavailable: the server is gone, or did not take them in time.
        """
        if self._group is None:
            raise EngineError(f"the group with {self.engine.url} is not open; await open() first")
        rows = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]
        sending = lambda: asyncio.to_thread(self._send, [tensor.detach().contiguous() for tensor in tensors.values()])
        await self.engine.update_from_group(self.name, rows, sending, version, flush_cache)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        with self._in_use:
            try:
                for tensor in tensors:
                    dist.broadcast(tensor, 0, group=self._group)
            except RuntimeError as error:  # all that torch says of a server that is gone
                raise EngineUnavailable(f"{self.engine.url} did not take the weights: {error}") from error

    def _destroy(self, group: Any) -> None:
        """Take our side apart, when no weight is being sent any more: one that is has a time-out."""
        with self._in_use:
            dist.destroy_process_group(group)

    async def close(self) -> None:
        """Take the group apart, on both sides.

        Raises:
            EngineError: the server did not leave it, or did not say so in time; this side has.
        """
        if self._group is None:
            return
        group, self._group = self._group, None
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self.engine.leave_group(self.name)
        except TimeoutError as error:
            raise EngineUnavailable(f"{self.engine.url} did not leave the group within {LEAVE_SECONDS:.0f} s") from error
        finally:
            await asyncio.to_thread(self._destroy, group)
            self._store = None
