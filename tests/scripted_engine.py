"""`ScriptedEngine`: a fake engine for tests and benchmarks. It answers by script and at once, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from relax_server.engines.base import GenerateRequest, Generation, PauseMode
from relax_server.models.processor import Processor

from relax_sdk.errors import EngineUnavailable
from relax_sdk.trajectory import VersionSpan

Reply = str | list[int] | Exception
Script = Callable[[GenerateRequest], Reply]


class ScriptedEngine:
    """Answers with text, with token ids, or with an error, as `script(request)` says.

    Prompts are expanded by the real processor from the media files that the request names. With `hold` cleared, calls wait
    for it, or for their abort. `up = False` makes it unreachable.
    """

    def __init__(self, processor: Processor, script: Script | str = "A", url: str = "scripted://a", version: int = 0) -> None:
        self.processor = processor
        self.script: Script = script if callable(script) else lambda request: script
        self.url = url
        self.deals_seeds = True
        self.version = version
        self.up = True
        self.hold = asyncio.Event()
        self.hold.set()
        self.requests: list[GenerateRequest] = []
        self.running: dict[str, asyncio.Event] = {}
        self.aborted: list[str | None] = []
        self.most_running = 0
        self._replies: dict[str, list[int]] = {}

    async def generate(self, request: GenerateRequest, timeout: float) -> list[Generation]:
        self.requests.append(request)
        if not self.up:
            raise EngineUnavailable(f"{self.url} is down")
        abort = False
        if not self.hold.is_set():
            abort = await self._wait(request.rid)
        if not self.up:
            raise EngineUnavailable(f"{self.url} went down")
        reply = self.script(request)
        if isinstance(reply, Exception):
            raise reply
        return [self._generation(request, self._ids(reply), abort)]

    async def _wait(self, rid: str) -> bool:
        """Wait for `hold` or the abort of `rid`; returns whether it was aborted."""
        aborted = self.running[rid] = asyncio.Event()
        self.most_running = max(self.most_running, len(self.running))
        waits = [asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(aborted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self.running[rid]
            for wait in waits:
                wait.cancel()
        return aborted.is_set()

    def _ids(self, reply: str | list[int]) -> list[int]:
        if isinstance(reply, list):
            return reply
        if reply not in self._replies:
            self._replies[reply] = [
                *self.processor.tokenizer.encode(reply, add_special_tokens=False),
                self.processor.eos_ids[-1],
            ]
        return self._replies[reply]

    def _generation(self, request: GenerateRequest, ids: list[int], abort: bool) -> Generation:
        features = [
            self.processor.features(Path(item.url).read_bytes(), item.ref.sha256, item.ref.kind) for item in request.media
        ]
        cut = ids[: request.sampling.max_new_tokens]
        reason = (
            "abort" if abort else "stop" if len(cut) == len(ids) and ids and ids[-1] in self.processor.eos_ids else "length"
        )
        return Generation(
            prompt_ids=self.processor.expand(request.input_ids, features),
            response_ids=list(cut),
            logprobs=[-1.0] * len(cut),
            weight_versions=[VersionSpan(self.version, 0, len(cut))] if cut else [],
            finish_reason=reason,
        )

    def stream(self, request: GenerateRequest, timeout: float) -> AsyncIterator[Generation]:
        raise NotImplementedError

    async def abort(self, rid: str | None) -> None:
        self.aborted.append(rid)
        for name, event in self.running.items():
            if rid is None or name == rid:
                event.set()

    async def update_weights(self, path: str, version: int, flush_cache: bool = True) -> None:
        self.version = version

    async def pause(self, mode: PauseMode) -> None:
        self.hold.clear()

    async def resume(self) -> None:
        self.hold.set()

    async def release_memory(self) -> None: ...

    async def resume_memory(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def health(self, timeout: float = 5.0) -> bool:
        return self.up

    async def server_info(self) -> dict[str, Any]:
        return {"running": len(self.running), "weight_version": self.version}

    async def model_info(self) -> dict[str, Any]:
        return {"model_path": str(self.processor.path), "weight_version": self.version}

    async def close(self) -> None: ...
