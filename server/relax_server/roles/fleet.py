"""The engines of a run: started together, kept on the current weights, and replaced when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_sdk.errors import EngineError, EngineUnavailable, RelaxError
from relax_sdk.runtime import Job
from relax_server.engines.http import HttpEngine
from relax_server.engines.kinds import connect
from relax_server.roles.host import Engine, Host
from relax_server.roles.layout import RunLayout
from relax_server.roles.restarts import Restarts

START_SECONDS = {"embedded": 180.0, "sglang": 600.0, "vllm": 600.0}
"""For an engine to load its model and answer, by kind."""

LOGS = {"embedded": "engine.log", "sglang": "sglang.log", "vllm": "vllm.log"}
NAMES = {"sglang": "SGLang", "vllm": "vLLM"}

HEALTH_SECONDS = 2.0
"""Between looks at the engines."""

MAX_MISSES = 10
"""Looks in a row at which an engine did not answer before it is replaced."""


@dataclass
class EngineSlot:
    """One engine of a run: its process, and our client to it."""

    process: Engine
    client: HttpEngine
    released: bool = False
    """Its memory is given back while the trainer works (colocate)."""

    @property
    def url(self) -> str:
        return self.process.url

    async def stop(self) -> None:
        """End the process and the client's connections."""
        await self.client.close()
        await self.process.stop()


class EngineFleet:
    """All engines of one run.

    Args:
        job: the run.
        host: starts them.
        model_path: the folder they start from.
        restarts: counts how often one was lost.
        features: folder in shared memory where media features are exchanged.
        stage: told how far a start is that takes long.
        warn: told what went wrong and was mended.
        changed: told the addresses when they are others than before.
        failed: told the error that ends the run, once no engine can be had any more.
    """

    def __init__(
        self,
        job: Job,
        host: Host,
        model_path: Path,
        restarts: Restarts,
        features: Path | None,
        *,
        stage: Callable[[str], None],
        warn: Callable[[str], None],
        changed: Callable[[tuple[str, ...]], None],
        failed: Callable[[RelaxError], None],
    ) -> None:
        self.job, self.host, self.model_path, self.restarts, self.features = job, host, model_path, restarts, features
        self._stage, self._warn, self._changed, self._failed = stage, warn, changed, failed
        self._slots: list[EngineSlot] = []
        self._weights: Path | None = None
        self._version = 0

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(slot.url for slot in self._slots)

    async def start(self, count: int) -> None:
        """Start them.

        Raises:
            EngineUnavailable: one ended, or was not ready in time.
        """
        self._slots = list(await asyncio.gather(*(self._start_one() for _ in range(count))))
        self._changed(self.urls)

    async def _start_one(self) -> EngineSlot:
        return await start_engine(self.job, self.host, self.model_path, features=self.features, stage=self._stage)

    async def stop(self) -> None:
        await asyncio.gather(*(slot.stop() for slot in self._slots), return_exceptions=True)

    async def load(self, weights: Path, version: int) -> None:
        """Bring every engine to these weights; one that cannot load them is ended, and `watch` starts another."""
        self._weights, self._version = weights, version
        await asyncio.gather(*(self._load_into(slot) for slot in self._slots))

    async def _load_into(self, slot: EngineSlot) -> None:
        if self._weights is None:
            return
        try:
            if slot.released:
                await slot.client.resume_memory()
            await slot.client.update_weights(str(self._weights), self._version)
            if slot.released:
                await slot.client.resume()
                slot.released = False
        except EngineError as error:
            self._warn(f"engine {slot.url} could not load version {self._version}: {error}")
            await slot.process.stop()

    async def release(self) -> None:
        """Colocate: the engines give their memory back until the next `load`."""
        for slot in self._slots:
            await slot.client.pause("abort")  # all that can be in flight is a call that nobody waits for any more
            await slot.client.release_memory()
            slot.released = True

    async def watch(self) -> None:
        """Replace engines that died or do not answer, for as long as the run goes on."""
        misses: dict[str, int] = {}
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            for index, slot in enumerate(self._slots):
                alive = slot.process.alive()
                healthy = alive and await slot.client.health()
                misses[slot.url] = 0 if healthy else misses.get(slot.url, 0) + 1
                if not alive or misses[slot.url] >= MAX_MISSES:
                    try:
                        await self._replace(index, "does not answer" if alive else "died")
                    except RelaxError as error:  # nobody awaits this task: the run must end with the error, not wait on
                        self._failed(error)
                        return

    async def _replace(self, index: int, why: str) -> None:
        """Start a new engine with the current weights in the place of one that is lost; it may be lost while it starts, too.

        Raises:
            RunError: too many were lost.
        """
        slot = self._slots[index]
        self.restarts.count("engine", slot.process.log_tail())
        self._warn(f"the engine at {slot.url} {why}; starting a new one")
        await slot.stop()
        while True:
            try:
                self._slots[index] = await self._start_one()
                break
            except EngineUnavailable as error:
                self.restarts.count("engine", str(error))
                self._warn(f"{error}; starting another one")
        await self._load_into(self._slots[index])
        self._changed(self.urls)


async def start_engine(
    job: Job,
    host: Host,
    model_path: Path,
    version: int = 0,
    train: bool = True,
    features: Path | None = None,
    stage: Callable[[str], None] = lambda what: None,
) -> EngineSlot:
    """Start an engine for a job and wait until it answers.

    Args:
        job: the run.
        host: starts it.
        model_path: the folder it starts from.
        version: of these weights.
        train: its work belongs into the run's timeline.
        features: folder in shared memory where media features are exchanged.
        stage: told how far a start is that takes long.

    Raises:
        EngineUnavailable: it ended, or was not ready in time.
        ConfigError: SGLang or vLLM is wanted and not installed, or cannot do here what the run wants.
    """
    media = RunLayout(job.folder).media
    media.mkdir(parents=True, exist_ok=True)
    config = job.config
    settings: dict[str, Any] = dict(
        media_root=media,
        dtype=config.training.dtype,
        return_routed_experts=config.training.replay_routes,
        weight_version=version,
        features=features,
    )
    if config.engine != "embedded":
        name = NAMES[config.engine]
        settings |= dict(
            releases_memory=config.mode == "colocate" and train,
            flags=config.engine_flags,
            progress=lambda what: stage(f"{name}: {what}"),
        )
    else:
        settings["timeline"] = RunLayout(job.folder).timeline if train else None
    process = host.engine(config.engine, model_path, job.folder / "logs" / LOGS[config.engine], **settings)
    await process.start(START_SECONDS[config.engine])
    return EngineSlot(process, connect(config.engine, process.url, media, model_path))
