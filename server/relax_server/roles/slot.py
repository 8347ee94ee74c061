"""One engine of a run: its process, unless it runs elsewhere, our client to it, and what it is doing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from relax_sdk.config import EngineKind, WeightsWay
from relax_sdk.errors import ConfigError, EngineError
from relax_sdk.runtime import Job
from relax_server.engines.addresses import EngineAddress
from relax_server.engines.http import HttpEngine
from relax_server.engines.kinds import connect, stated_kind
from relax_server.engines.settings import EngineSettings
from relax_server.engines.tokens import find_token
from relax_server.loading_time import seconds_to_load
from relax_server.roles.layout import RunLayout
from relax_server.roles.placement import Engine, Placement

if TYPE_CHECKING:
    from relax_server.engines.sglang.broadcast import WeightGroup

START_SECONDS = {"embedded": 180.0, "sglang": 600.0, "vllm": 600.0}
"""Seconds for an engine to answer, by kind; loading its model comes on top."""

EVALUATION = "evaluation"
"""The engine that a trained model is tried with; the log of a run that goes on meanwhile is another one."""

NAMES = {"sglang": "SGLang", "vllm": "vLLM"}

SlotState = Literal["starting", "current", "draining", "lost"]


@dataclass(eq=False)
class EngineSlot:
    """One engine of a run."""

    id: str
    kind: EngineKind
    process: Engine | None
    """None: it runs elsewhere, and is never stopped by us."""
    address: str = ""
    """Address of an engine that runs elsewhere."""
    secret: str = field(default="", repr=False)
    """Token that was given for an engine that runs elsewhere; empty: `find_token` is asked."""
    added: bool = False
    """Whether it came after the engines that the run began with."""
    weights: WeightsWay = "folder"
    """How it gets new weights: from the run's exchange folder, or over the network."""
    state: SlotState = "starting"
    """`starting`: it does not have the current weights yet. `current`: in the pool. `draining`: it finishes what it has.
    `lost`: it cannot be had; `reason` says why."""
    reason: str = ""
    released: bool = False
    """Its memory is given back while the trainer works (colocate)."""
    misses: int = 0
    """Looks in a row at which it did not answer."""
    pause: float = 0.0
    """Seconds before one that runs elsewhere and was lost is tried again."""
    token: str = field(default="", repr=False)
    """What it wants to be shown; known once it is started."""
    since: float | None = None
    """Unix seconds of its last start; None before that."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """No call is in flight any more, and none will be."""
    task: asyncio.Task[None] | None = None
    """Its start, or its end."""
    _client: HttpEngine | None = None
    _group: WeightGroup | None = None
    """Broadcasts weights to it, once it has been given some."""

    @property
    def external(self) -> bool:
        return self.process is None

    @property
    def url(self) -> str:
        """The address at which it answers; empty before it is started."""
        try:
            return self.address if self.process is None else self.process.url
        except EngineError:
            return ""

    @property
    def reach(self) -> EngineAddress:
        """Where it answers, and, once it is started, what it wants to be shown."""
        return EngineAddress(self.url, self.kind, self.token, self.external)

    @property
    def started(self) -> bool:
        """Whether there is a `client`."""
        return self._client is not None

    @property
    def client(self) -> HttpEngine:
        """Client of an engine that was started."""
        assert self._client is not None
        return self._client

    async def connect(self, media: Path, model_path: Path) -> None:
        """Make the client, once it has an address."""
        await self._leave()
        if self._client is not None:
            await self._client.close()
        self._client = connect(self.reach, media, model_path)

    async def update_weights(self, folder: Path, version: int) -> None:
        """Have it take the weights in a folder.

        Raises:
            EngineError: it did not.
        """
        if self.weights == "folder":
            return await self.client.update_weights(str(folder), version)
        from relax_server.engines.sglang.broadcast import WeightGroup
        from relax_server.models.weight_files import read_weights

        try:
            weights = await asyncio.to_thread(read_weights, folder)
        except (ConfigError, OSError) as error:  # they may have been taken away for newer ones
            raise EngineError(f"the weights in {folder} cannot be sent to {self.url}: {error}") from error
        try:
            if self._group is None:
                self._group = await asyncio.to_thread(WeightGroup.with_engine, self.client)
                await self._group.open()
            await self._group.update(weights, version)
        except BaseException:
            await self._leave()  # whatever state its group is in, the next weights get a new one
            raise

    async def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(EngineError):  # a server that is gone leaves no group; our side is taken apart
                await group.close()

    def alive(self) -> bool:
        """Whether its process exists, as far as we can know."""
        return self.process is None or self.process.alive()

    async def log_tail(self) -> str:
        """The end of its log."""
        return f"its log is where {self.url} runs" if self.process is None else await self.process.log_tail()

    async def stop(self) -> None:
        """End the process, if it is ours, and the client's connections."""
        await self._leave()
        if self._client is not None:
            await self._client.close()
        if self.process is not None:
            await self.process.stop()


async def start_engine(
    job: Job,
    placement: Placement,
    model_path: Path,
    version: int = 0,
    train: bool = True,
    features: Path | None = None,
    stage: Callable[[str], None] = lambda what: None,
) -> EngineSlot:
    """Start an engine for a job and wait until it answers.

    Args and raises: as `make_process` and `start`.
    """
    process = make_process(EVALUATION, job, placement, model_path, version, train, features, stage)
    slot = EngineSlot(EVALUATION, job.config.engine, process)
    await start(slot, job, model_path)
    return slot


async def start(slot: EngineSlot, job: Job, model_path: Path) -> None:
    """Start an engine, if it is ours, and make the client.

    Raises:
        EngineUnavailable: it ended, or was not ready in time.
        EngineDenied: what runs elsewhere wants another token.
        EngineError: what runs elsewhere is of another kind than was said.
        ConfigError: SGLang or vLLM is wanted and not installed, or cannot do here what the run wants.
    """
    slot.since = time.time()
    if slot.process is not None:
        await slot.process.start(seconds_to_load(START_SECONDS[slot.kind], model_path))
        slot.token = slot.process.token
    else:
        job.config.check_engine(slot.kind)
        slot.token = slot.secret or await asyncio.to_thread(find_token, slot.url)
        stated = await stated_kind(slot.url, slot.token)
        if stated not in (None, slot.kind):
            raise EngineError(
                f"{slot.url} is an engine of kind {stated!r}, and was added as {slot.kind!r}; add it again with kind={stated!r}"
            )
    await slot.connect(RunLayout(job.folder).media, model_path)


def make_process(
    id: str,
    job: Job,
    placement: Placement,
    model_path: Path,
    version: int = 0,
    train: bool = True,
    features: Path | None = None,
    stage: Callable[[str], None] = lambda what: None,
    added: bool = False,
) -> Engine:
    """The process of an engine, not started yet.

    Args:
        id: of the engine; its log is `logs/engine-ID.log`.
        job: the run.
        placement: starts it.
        model_path: the folder it starts from.
        version: of these weights.
        train: its work belongs into the run's timeline.
        features: folder in shared memory where media features are exchanged.
        stage: told how far a start is that takes long.
        added: beyond the engines that the run began with.
    """
    media = RunLayout(job.folder).media
    media.mkdir(parents=True, exist_ok=True)
    config = job.config
    own = config.engine == "embedded"
    settings = EngineSettings(
        media_root=media,
        dtype=config.training.dtype,
        return_routed_experts=config.training.replay_routes,
        weight_version=version,
        features=features,
        timeline=RunLayout(job.folder).timeline if own and train else None,
        releases_memory=config.mode == "colocate" and train,
        flags=tuple(config.engine_flags),
    )
    name = NAMES.get(config.engine, config.engine)
    progress = None if own else lambda what: stage(f"{name}: {what}")
    log = job.folder / "logs" / f"engine-{id}.log"
    return placement.engine(config.engine, model_path, log, settings, progress=progress, added=added)
