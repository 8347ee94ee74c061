"""The engines of a run: kept on the current weights, replaced when one is lost, added and removed while it goes on."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from relax_sdk.config import EngineKind, WeightsWay
from relax_sdk.errors import ConfigError, EngineError, EngineUnavailable, RelaxError
from relax_sdk.runtime import Job
from relax_server.engines.addresses import EngineAddress, check_address
from relax_server.engines.tokens import check_token
from relax_server.roles.fleet_weights import FleetWeights
from relax_server.roles.placement import Placement
from relax_server.roles.record import Warns
from relax_server.roles.restarts import Restarts
from relax_server.roles.slot import EngineSlot, SlotState, make_process, start

HEALTH_SECONDS = 2.0
"""Between looks at the engines."""

MAX_MISSES = 10
"""Looks in a row at which an engine did not answer before it is replaced."""

FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0
"""Seconds before an engine that runs elsewhere and was lost is tried again; doubled each time up to the second."""

DRAIN_SECONDS = 60.0
"""For the calls in flight at an engine that is removed; those that are left begin again elsewhere."""

LEFT_SECONDS = 5.0
"""For the rollout to say, after that, that an engine has left the pool; it may be starting again."""


class EngineConflict(EngineError):
    """An engine that cannot be added or removed as things are."""


@dataclass(frozen=True)
class EngineInfo:
    """An engine of a run as it is now."""

    id: str
    kind: EngineKind
    url: str
    """Empty before it answers for the first time."""
    state: SlotState
    reason: str
    """Why it is lost or being started again."""
    external: bool
    """It runs elsewhere, and is not stopped when it is removed."""


class EngineFleet:
    """All engines of one run. Belongs to one event loop.

    Args:
        job: the run.
        placement: starts them.
        model_path: the folder they start from.
        restarts: counts how often one was lost.
        features: folder in shared memory where media features are exchanged.
        stage: told how far a start is that takes long.
        warn: told what went wrong and was mended.
        changed: called when the addresses are others than before, with the seconds that calls in flight may take at those
            that are gone; `left` is to be called for each of these.
        failed: told the error that ends the run, once no engine can be had any more.
    """

    def __init__(
        self,
        job: Job,
        placement: Placement,
        model_path: Path,
        restarts: Restarts,
        features: Path | None,
        *,
        stage: Callable[[str], None],
        warn: Warns,
        changed: Callable[[float], None],
        failed: Callable[[RelaxError], None],
    ) -> None:
        self.job, self.placement, self.model_path, self.restarts, self.features = job, placement, model_path, restarts, features
        self._stage, self._warn, self._changed, self._failed = stage, warn, changed, failed
        self._slots: dict[str, EngineSlot] = {}
        self._weights = FleetWeights(self._in, self._lost)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def addresses(self) -> tuple[EngineAddress, ...]:
        """Addresses of engines that accept calls."""
        return tuple(slot.reach for slot in self._in("current"))

    @property
    def version(self) -> int:
        """Version of the current weights."""
        return self._weights.version

    @property
    def infos(self) -> list[EngineInfo]:
        return [_info(slot) for slot in self._slots.values()]

    @property
    def slots(self) -> list[EngineSlot]:
        """All engines, whatever their state."""
        return [*self._slots.values()]

    def _in(self, *states: SlotState) -> list[EngineSlot]:
        return [slot for slot in self._slots.values() if slot.state in states]

    async def start(self, count: int) -> None:
        """Start the first ones.

        Raises:
            EngineUnavailable: one ended, or was not ready in time.
        """
        slots = [self._new(self._free_id()) for _ in range(count)]
        await asyncio.gather(*(self._spawn(self._join(slot)) for slot in slots))
        self._changed(0.0)

    async def stop(self) -> None:
        """End all of ours."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.stop() for slot in self._slots.values()), return_exceptions=True)

    # --------------------------------------------------------------------------------------------------- adding, removing

    def add(
        self,
        id: str | None = None,
        url: str | None = None,
        kind: EngineKind | None = None,
        token: str | None = None,
        weights: WeightsWay | None = None,
    ) -> EngineInfo:
        """Begin to add an engine; it joins the pool once it has the current weights. One that is there already stays.

        Args:
            id: its name; None: a free one.
            url: of one that runs elsewhere; None: one is started.
            kind: of the one at `url`; None: as the run's own.
            token: of the one at `url`; None: what `find_token` finds for it.
            weights: how the one at `url` gets new weights; None: `folder`, it can read the run's exchange folder.

        Returns:
            It as it is now; `infos` tells how it goes on. One that cannot be started stays there as `lost`, until it is
            removed, or added again, which is another try.

        Raises:
            ConfigError: not a name, a URL, a kind or a token of an engine, or a URL that the run may not use.
            EngineConflict: the name or the URL is taken by another engine, or by one that is leaving.
        """
        if id is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", id):
            raise ConfigError(f"id = {id!r}; allowed: up to 64 letters, digits, dots, dashes and underscores")
        if kind is not None and (kind not in get_args(EngineKind) or url is None):
            raise ConfigError(f"kind = {kind!r}; allowed: {', '.join(get_args(EngineKind))}, and only together with a url")
        if token is not None and url is None:
            raise ConfigError("token = …; allowed: only together with a url, as an engine of the run has its own")
        if weights is not None and (weights not in get_args(WeightsWay) or url is None):
            raise ConfigError(
                f"weights = {weights!r}; allowed: {', '.join(get_args(WeightsWay))}, and only together with a url"
            )
        if weights == "broadcast" and (kind or self.job.config.engine) != "sglang":
            raise ConfigError("weights = 'broadcast': SGLang alone takes weights so; with another kind allowed: 'folder'")
        token = "" if token is None else check_token(token, "token")
        url = None if url is None else check_address(url, self.job.config.engine_hosts)
        there = self._there(id, url)
        if there is not None and there.state != "lost":
            if there.state == "draining":
                raise EngineConflict(f"engine {there.id} is leaving; add it again when it is gone")
            return _info(there)
        slot = self._new(id or (there.id if there is not None else self._free_id()), url, kind, token, weights or "folder")
        if there is not None and there.task is not None:
            there.task.cancel()
        slot.task = self._spawn(self._add(slot, there))
        return _info(slot)

    def _there(self, id: str | None, url: str | None) -> EngineSlot | None:
        """The engine that is meant, if there is one."""
        named = self._slots.get(id) if id is not None else None
        placed = next((s for s in self._slots.values() if url is not None and s.url == url), None)
        if named is not None and url is not None and named.address != url:
            raise EngineConflict(f"there is an engine {id} at {named.url or 'no address yet'}, not {url}")
        if placed is not None and id is not None and placed.id != id:
            raise EngineConflict(f"the engine at {url} is there already, as {placed.id}")
        return named or placed

    def _free_id(self) -> str:
        return next(id for n in itertools.count(1) if (id := f"e{n}") not in self._slots)

    def _new(
        self,
        id: str,
        url: str | None = None,
        kind: EngineKind | None = None,
        token: str = "",
        weights: WeightsWay = "folder",
    ) -> EngineSlot:
        """A slot, its engine not started yet."""
        ours = [slot for slot in self._slots.values() if slot.id != id and not slot.external and not slot.added]
        added = len(ours) >= self.job.config.engines
        slot = EngineSlot(id, kind or self.job.config.engine, None, url or "", token, added, weights)
        if url is None:
            self._renew(slot)
        self._slots[id] = slot
        return slot

    def _renew(self, slot: EngineSlot) -> None:
        job, placement, features = self.job, self.placement, self.features
        slot.process = make_process(
            slot.id, job, placement, self.model_path, features=features, stage=self._stage, added=slot.added
        )

    async def _add(self, slot: EngineSlot, before: EngineSlot | None) -> None:
        """Start an engine that was asked for; if it cannot be had, the run goes on without it."""
        if before is not None:
            await before.stop()
        try:
            await self._join(slot)
        except RelaxError as error:
            await slot.stop()
            self._give_up(slot, f"it could not be added: {error}")
        else:
            self._changed(0.0)

    def remove(self, id: str, drain_seconds: float = DRAIN_SECONDS) -> EngineInfo | None:
        """Begin to remove an engine: it gets nothing new, finishes what it has, and is stopped if it is ours.

        Args:
            id: its name.
            drain_seconds: for its calls in flight; those that are left begin again elsewhere.

        Returns:
            It as it is now; None: there is none of that name (any more).

        Raises:
            EngineConflict: no other engine could take over.
        """
        slot = self._slots.get(id)
        if slot is None or slot.state == "draining":
            return None if slot is None else _info(slot)
        if all(other is slot for other in self._in("current")):
            raise EngineConflict(f"engine {id} is the last one, and stays: a run needs one; add another before")
        drain = drain_seconds if slot.state == "current" else None
        slot.state, slot.reason = "draining", ""
        if drain is not None:
            self._changed(drain)
        slot.task = self._spawn(self._leave(slot, drain, slot.task))
        return _info(slot)

    def left(self, url: str) -> None:
        """The rollout says: no call is in flight at this engine, and none will be."""
        for slot in self._in("draining"):
            if slot.url == url:
                slot.left.set()

    async def _leave(self, slot: EngineSlot, drain: float | None, before: asyncio.Task[None] | None) -> None:
        """Wait for the rollout, where it used the engine, then stop it."""
        if before is not None:
            before.cancel()
            await asyncio.gather(before, return_exceptions=True)
            slot.state = "draining"
        if drain is not None:
            try:
                await asyncio.wait_for(slot.left.wait(), drain + LEFT_SECONDS)
            except TimeoutError:
                late = f"within {drain + LEFT_SECONDS:g} s"
                self._warn(f"the rollout did not say that it left engine {slot.id} {late}", role="rollout")
        await slot.stop()
        if self._slots.get(slot.id) is slot:
            del self._slots[slot.id]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------------------------------------------------------ weights

    async def load(self, weights: Path, version: int) -> None:
        """Bring every engine to these weights; one that cannot load them is lost, and another one takes its place.

        An engine that is just joining sees that there are others, and loads them before it is used.
        """
        await self._weights.load(weights, version)

    async def release(self) -> None:
        """Colocate: the engines give their memory back until the next `load`."""
        await self._weights.release()

    async def _join(self, slot: EngineSlot) -> None:
        """Start an engine, and let it into the pool with the current weights.

        Raises:
            EngineError: it cannot be had, or holds others after all.
            ConfigError: it cannot be started as the run is configured.
        """
        slot.state = "starting"
        await start(slot, self.job, self.model_path)
        await self._weights.let_in(slot)

    # ------------------------------------------------------------------------------------------------------------- losses

    async def watch(self) -> None:
        """Replace engines that died or do not answer, for as long as the run goes on."""
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            await asyncio.gather(*(self._look_at(slot) for slot in self._in("current")))

    async def _look_at(self, slot: EngineSlot) -> None:
        alive = slot.alive()
        healthy = alive and await slot.client.health()
        slot.misses = 0 if healthy else slot.misses + 1
        if slot.state == "current" and (not alive or slot.misses >= MAX_MISSES):
            self._lost(slot, "does not answer" if alive else "died")

    def _lost(self, slot: EngineSlot, why: str) -> None:
        """Take an engine out of the pool; another one takes its place, or it is tried again after a while."""
        slot.state, slot.reason = "lost" if slot.external else "starting", why
        if slot.external:
            self._warn(f"the engine {slot.id} at {slot.url} {why}; it is left out", role=f"engine-{slot.id}")
        self._changed(0.0)
        slot.task = self._spawn(self._await_return(slot) if slot.external else self._replace(slot, why))

    async def _await_return(self, slot: EngineSlot) -> None:
        """Try an engine that runs elsewhere again and again."""
        while True:
            slot.pause = min(2 * slot.pause, LONGEST_PAUSE) or FIRST_PAUSE
            await asyncio.sleep(slot.pause)
            pause = slot.pause
            try:
                if await slot.client.health():
                    await self._join(slot)
                    break
            except RelaxError as error:
                slot.state, slot.reason, slot.pause = "lost", str(error), pause
        self._warn(f"the engine {slot.id} at {slot.url} is back", role=f"engine-{slot.id}")
        self._changed(0.0)

    async def _replace(self, slot: EngineSlot, why: str) -> None:
        """Start a new engine with the current weights in the place of one that is lost; it may be lost while it starts, too."""
        try:
            self.restarts.count(f"engine {slot.id}", await slot.log_tail())
            self._warn(f"the engine at {slot.url} {why}; starting a new one", "restart", f"engine-{slot.id}")
            while True:
                await slot.stop()
                self._renew(slot)
                try:
                    await self._join(slot)
                    break
                except EngineError as error:
                    self.restarts.count(f"engine {slot.id}", str(error))
                    self._warn(f"{error}; starting another one", "restart", f"engine-{slot.id}")
        except RelaxError as error:  # nobody awaits this task
            await slot.stop()
            self._give_up(slot, str(error))
        else:
            self._changed(0.0)

    def _give_up(self, slot: EngineSlot, why: str) -> None:
        """The run goes on with the other engines, and ends if there are none."""
        slot.state, slot.reason = "lost", why
        if self._in("current", "starting"):
            self._warn(f"engine {slot.id} is given up: {why}", role=f"engine-{slot.id}")
        else:
            self._failed(EngineUnavailable(why))


def _info(slot: EngineSlot) -> EngineInfo:
    return EngineInfo(slot.id, slot.kind, slot.url, slot.state, slot.reason, slot.external)
