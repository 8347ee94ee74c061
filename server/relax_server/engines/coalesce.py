"""Equal requests as one: the episodes of a group ask the same first question, and the engine is asked once for n answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from relax_sdk.errors import EngineAborted
from relax_server.engines.base import Engine, GenerateRequest, Generation, PauseMode

WINDOW = 0.002
"""Seconds that a request waits for others like it."""

MOST_TOKENS = 64
"""Requests for longer answers go alone: n answers come back together, so a short one would wait for the longest."""

ABORT_TIMEOUT = 5.0


@dataclass(eq=False)
class _Batch:
    """Equal requests that are, or will be, one."""

    request: GenerateRequest
    waiting: list[asyncio.Future[Generation]] = field(default_factory=list)
    seeds: dict[asyncio.Future[Generation], int] = field(default_factory=dict)
    """Seeds of the answers that are to have one of their own."""
    timeout: float = 0.0
    task: asyncio.Task[None] | None = None


class CoalescingEngine:
    """An engine in front of which equal requests for one short answer are put together.

    Each caller gets an answer of its own, sampled independently. One that gives up does not disturb the others; when all have,
    the request is aborted. Each keeps its own sampling seed where the engine takes several in one request; where not, requests
    with a seed are left alone, as equal seeds would make equal answers.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.url = engine.url
        self.deals_seeds = engine.deals_seeds
        self._open: dict[Any, _Batch] = {}
        self._callers: dict[str, tuple[_Batch, asyncio.Future[Generation]]] = {}
        """Callers by the name of their request."""
        self._background: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest, timeout: float) -> list[Generation]:
        s = request.sampling
        seeded = s.sampling_seed is not None
        if request.alone or request.n != 1 or s.max_new_tokens > MOST_TOKENS or (seeded and not self.deals_seeds):
            return await self.engine.generate(request, timeout)
        alike = s.with_seed(None)
        key = (tuple(request.input_ids), request.media, alike, seeded, request.return_routed_experts)
        batch = self._open.get(key)
        loop = asyncio.get_running_loop()
        if batch is None:
            batch = self._open[key] = _Batch(request)
            loop.call_later(WINDOW, self._send, key)
        future: asyncio.Future[Generation] = loop.create_future()
        batch.waiting.append(future)
        if s.sampling_seed is not None:
            batch.seeds[future] = s.sampling_seed
        batch.timeout = max(batch.timeout, timeout)
        if request.rid:
            self._callers[request.rid] = batch, future
        try:
            return [await future]
        finally:
            self._callers.pop(request.rid, None)
            if future.cancelled():
                self._left(batch)

    def _send(self, key: Any) -> None:
        batch = self._open.pop(key)
        if any(not future.done() for future in batch.waiting):
            batch.task = asyncio.get_running_loop().create_task(self._ask(batch))

    async def _ask(self, batch: _Batch) -> None:
        batch.waiting = [future for future in batch.waiting if not future.done()]
        n = len(batch.waiting)
        seeds = tuple(batch.seeds[future] for future in batch.waiting if future in batch.seeds)
        request = replace(batch.request, n=n, seeds=seeds, rid=_name(batch.request.rid, n))
        try:
            answers = await self.engine.generate(request, batch.timeout)
        except BaseException as error:
            for future in batch.waiting:
                if not future.done():
                    future.set_exception(error)
                    future.exception()  # a caller may be gone by now
            if not isinstance(error, Exception):
                raise
            return
        for future, answer in zip(batch.waiting, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    def _left(self, batch: _Batch) -> None:
        """A caller has given up; if all have, so does the request."""
        task = batch.task
        if task is None or task.done() or not all(future.done() for future in batch.waiting):
            return
        batch.task = None
        task.cancel()
        rid = _name(batch.request.rid, len(batch.waiting))
        abort = asyncio.get_running_loop().create_task(self._abort(rid))
        self._background.add(abort)
        abort.add_done_callback(self._background.discard)

    async def _abort(self, rid: str) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT):
                await self.engine.abort(rid)
        except Exception:  # nobody waits for this answer any more; the engine ends it at its token limit
            return

    async def abort(self, rid: str | None) -> None:
        """Abort a request, or all with None; of requests that were put together, the others go on."""
        caller = self._callers.get(rid) if rid is not None else None
        if caller is None:
            await self.engine.abort(rid)
            return
        batch, future = caller
        if not future.done():
            future.set_exception(EngineAborted(f"{rid} was aborted"))
            self._left(batch)

    def stream(self, request: GenerateRequest, timeout: float) -> AsyncIterator[Generation]:
        return self.engine.stream(request, timeout)

    async def update_weights(self, path: str, version: int, flush_cache: bool = True) -> None:
        await self.engine.update_weights(path, version, flush_cache)

    async def pause(self, mode: PauseMode) -> None:
        await self.engine.pause(mode)

    async def resume(self) -> None:
        await self.engine.resume()

    async def release_memory(self) -> None:
        await self.engine.release_memory()

    async def resume_memory(self) -> None:
        await self.engine.resume_memory()

    async def flush_cache(self) -> None:
        await self.engine.flush_cache()

    async def health(self, timeout: float = 5.0) -> bool:
        return await self.engine.health(timeout)

    async def server_info(self) -> dict[str, Any]:
        return await self.engine.server_info()

    async def model_info(self) -> dict[str, Any]:
        return await self.engine.model_info()

    async def close(self) -> None:
        await self.engine.close()


def _name(rid: str, n: int) -> str:
    return f"{rid}+{n - 1}" if rid and n > 1 else rid
