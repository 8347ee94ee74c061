"""Commands to a real SGLang server, whichever way it was started."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_sdk.errors import EngineError
from relax_server.engines.base import GenerateRequest, Generation, PauseMode
from relax_server.engines.http import CONTROL_TIMEOUT, HttpEngine
from relax_server.engines.weight_shapes import WeightShapes, read_shapes

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)

SEEDED = '{"sampling_seeds": "per_request"}'
"""A label by which a server says that it takes the seeds of requests (`inside/`)."""

UNSEEDED = (
    "{url}: this SGLang server ignores sampling seeds, so a second run with the same seed has other tokens, and answers are "
    "recorded without a seed. Start the server with --enable-deterministic-inference, or by `relax engine sglang`, which costs "
    "less speed. Not said again of this server"
)

END = "|"
"""Ends the name of every request: SGLang aborts all whose names begin with the one it is given."""


class SglangEngine(HttpEngine):
    """`HttpEngine` for SGLang 0.5.23, whose commands differ from what their names say in these ways.

    A weight update waits until no request is left, and new ones wait behind it; so it is done in a pause (`retract`: running
    requests begin again from their tokens, with the new weights). After `pause("in_place")` they go on from their old keys
    and values, and the cached prefixes stay until `flush_cache`, which SGLang refuses while a request runs. Weights of
    another model are loaded as far as they fit, so their names and shapes are compared first. `ignore_eos` ignores
    `stop_token_ids`, too, and without a flag at its start giving memory back frees nothing; these are refused here. A server
    that was started elsewhere, and without `--enable-deterministic-inference`, ignores sampling seeds; its answers then say
    that they were not drawn from one (`Generation.seeded`), and that is told once.

    Args: as `HttpEngine`'s; `routed_shape` is needed where routed experts are asked for, as SGLang does not state it. `warn`
        takes what the user should know; default: the log.
    """

    def __init__(
        self,
        url: str,
        media_root: str | Path | None = None,
        *,
        token: str = "",
        inline_media: bool = False,
        routed_shape: tuple[int, int] | None = None,
        control_timeout: float = CONTROL_TIMEOUT,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        super().__init__(
            url,
            media_root,
            token=token,
            inline_media=inline_media,
            routed_shape=routed_shape,
            control_timeout=control_timeout,
        )
        self._paused: PauseMode | None = None
        self._weights: WeightShapes | None = None
        self._settings: dict[str, Any] | None = None
        self.deals_seeds = False
        self._warn = warn
        self._told = False

    async def generate(self, request: GenerateRequest, timeout: float) -> list[Generation]:
        seeded = await self._check(request)
        answers = await super().generate(request, timeout)
        for answer in answers:
            answer.seeded = seeded
        return answers

    async def stream(self, request: GenerateRequest, timeout: float) -> AsyncIterator[Generation]:
        seeded = await self._check(request)
        async for part in super().stream(request, timeout):
            part.seeded = seeded
            yield part

    def _payload(self, request: GenerateRequest) -> dict[str, Any]:
        payload = super()._payload(request)
        if request.rid:
            payload["rid"] = request.rid + END
        return payload

    async def abort(self, rid: str | None) -> None:
        await super().abort(None if rid is None else rid + END)

    async def _check(self, request: GenerateRequest) -> bool:
        """Refuse what SGLang does otherwise than asked; returns whether it takes a seed."""
        sampling = request.sampling
        if sampling.ignore_eos and sampling.stop_token_ids:
            raise EngineError(f"{self.url}: with ignore_eos SGLang ignores stop_token_ids, too; use one of them")
        started = await self._started()
        labels = started.get("extra_metric_labels") or {}
        seeded = bool(started.get("enable_deterministic_inference")) or "sampling_seeds" in labels
        if not (seeded or self._told) and sampling.sampling_seed is not None and sampling.temperature > 0:
            self._told = True
            self._warn(UNSEEDED.format(url=self.url))
        return seeded

    async def _started(self) -> dict[str, Any]:
        """The settings that the server was started with."""
        settings = self._settings
        if settings is None:
            settings = self._settings = await self._json("GET", "/server_info", None, self._control_timeout)
        return settings

    async def _started_with(self, flag: str) -> bool:
        return bool((await self._started()).get(flag))

    async def update_weights(self, path: str, version: int, flush_cache: bool = True) -> None:
        """As `Engine.update_weights`; `path` must be a folder on this machine, too.

        Raises:
            EngineError: names or shapes differ from the model's, or SGLang could not load them.
        """
        folder = Path(path)
        await self._compare(await asyncio.to_thread(read_shapes, folder), str(folder))
        async with self._quiet():
            await super().update_weights(path, version, flush_cache and self._paused != "in_place")

    async def update_from_tensors(self, tensors: Mapping[str, torch.Tensor], version: int, flush_cache: bool = True) -> None:
        """As `update_weights`, with tensors of this process, through shared memory; SGLang must run on this machine.

        Args:
            tensors: all weights, by the names of the model's folder.
            version: of these weights.
            flush_cache: forget what was computed with the old ones.

        Raises:
            EngineError: names or shapes differ from the model's, or SGLang could not load them.
        """
        from relax_server.engines.sglang.tensors import payloads

        await self._compare({name: list(tensor.shape) for name, tensor in tensors.items()}, "the tensors")
        with payloads(tensors, await self.ranks()) as handles:
            body = {"serialized_named_tensors": handles, "weight_version": str(version)}
            await self._update("/update_weights_from_tensor", body, flush_cache)

    async def update_from_group(
        self,
        group: str,
        rows: Sequence[tuple[str, str, list[int]]],
        send: Callable[[], Awaitable[None]],
        version: int,
        flush_cache: bool,
    ) -> None:
        """Weights that another member of a process group broadcasts; `broadcast.WeightGroup` is that member.

        Args:
            group: its name; the server has joined it.
            rows: name, dtype and shape of each weight, in the order in which they are sent.
            send: sends them.
            version: of these weights.
            flush_cache: forget what was computed with the old ones.

        Raises:
            EngineError: names or shapes differ from the model's, or SGLang could not load them.
        """
        names, dtypes, shapes = (list(column) for column in zip(*rows, strict=True))
        await self._compare(dict(zip(names, shapes, strict=True)), "the weights of the group")
        body = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": group, "weight_version": str(version)}
        await self._update("/update_weights_from_distributed", body, flush_cache, send)

    async def _update(
        self, path: str, body: Mapping[str, Any], flush_cache: bool, beside: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """One update between begin and end, which SGLang wants around all but those from disk."""
        async with self._quiet():
            await self._demand("/begin_weight_update", {})
            try:
                update = self._demand(path, {**body, "flush_cache": flush_cache and self._paused != "in_place"})
                await asyncio.gather(update, *([beside()] if beside is not None else []))
            finally:
                await self._demand("/end_weight_update", {})

    async def ranks(self) -> int:
        """Tensor-parallel ranks of the server."""
        return int((await self._started())["tp_size"])

    async def join_group(self, name: str, address: str, port: int, world: int, backend: str) -> None:
        """Have the server's ranks meet others at `address:port`; ours are those after the first."""
        body = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world}
        await self._demand("/init_weights_update_group", {**body, "group_name": name, "backend": backend})

    async def leave_group(self, name: str) -> None:
        """Have the server's ranks leave."""
        await self._demand("/destroy_weights_update_group", {"group_name": name})

    async def _demand(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self._control(path, body)
        if not isinstance(answer, dict) or not answer.get("success"):
            raise EngineError(f"{self.url}{path}: {answer}")

    @asynccontextmanager
    async def _quiet(self) -> AsyncIterator[None]:
        """No request runs meanwhile; a pause of ours ends with the block."""
        if self._paused is not None:
            yield
            return
        await self.pause("retract")
        try:
            yield
        finally:
            await self.resume()

    async def _compare(self, new: dict[str, list[int]], what: str) -> None:
        """Whether weights are of the served model; what SGLang does not find a place for it only logs."""
        if self._weights is None:
            served = Path((await self.model_info())["model_path"])
            self._weights = await asyncio.to_thread(WeightShapes.of_served, served, new)
        self._weights.check(new, what)

    async def pause(self, mode: PauseMode) -> None:
        await super().pause(mode)
        self._paused = mode

    async def resume(self) -> None:
        await super().resume()
        self._paused = None

    async def release_memory(self) -> None:
        await self._need_memory_saver()
        await super().release_memory()

    async def resume_memory(self) -> None:
        await self._need_memory_saver()
        await super().resume_memory()

    async def _need_memory_saver(self) -> None:
        if not await self._started_with("enable_memory_saver"):
            raise EngineError(
                f"{self.url}: SGLang gives memory back only when it was started with --enable-memory-saver, on a GPU"
            )

    async def server_info(self) -> dict[str, Any]:
        """SGLang's, and from it `running`, `waiting` and `cached_tokens` under the names that all engines have."""
        info = await super().server_info()
        loads = (await self._json("GET", "/v1/loads", None, self._control_timeout))["loads"]
        running, waiting, used = (
            sum(load[name] for load in loads) for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        )
        return {**info, "running": running, "waiting": waiting, "cached_tokens": used}
