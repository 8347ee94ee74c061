"""Rollouts: groups of episodes that the service plays by itself; who may begin and end them, and which service plays which."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from typing import Any

from relax_sdk.errors import RelaxError
from relax_server.api.core import DATABASE_LIMIT, ServiceCore
from relax_server.api.holding import Holding, keep
from relax_server.api.keys import LOCAL, Key
from relax_server.api.logs import FIELDS
from relax_server.api.pausing import Gate
from relax_server.api.rollout_player import RolloutPlayer, indices
from relax_server.api.rollout_store import ACTIVE, Rollout, RolloutStore
from relax_server.api.schemas import RolloutBody
from relax_server.api.starts import GroupStarts
from relax_server.gateway.errors import ApiError, bad, unknown

logger = logging.getLogger(__name__)

CANCEL_SECONDS = 1.0
"""Seconds in which the episodes of a rollout that is cancelled may end before its owner is answered."""


class RolloutHub:
    """The rollouts that this server plays; those that a crash interrupted go on where the journal ends, also another service's.

    Args:
        core: of the service.
    """

    def __init__(self, core: ServiceCore) -> None:
        self.core = core
        self.store = RolloutStore(core.journal, Holding("rollout", core.holder), core.config.model)
        self._playing: dict[str, tuple[Rollout, asyncio.Task[None]]] = {}
        self._gates: dict[str, Gate] = {}
        self._starts = GroupStarts(core.slots.total)
        self._player = RolloutPlayer(core, self.store, self._starts)
        self._switching = asyncio.Lock()
        """Held while states are compared with those in the database."""
        self._keeping: asyncio.Task[None] | None = None

    @property
    def playing(self) -> int:
        """Rollouts under way."""
        return len(self._playing)

    @property
    def topics(self) -> list[str]:
        """Topics of the events of rollouts under way."""
        return [rollout.topic for rollout, _ in self._playing.values()]

    async def submit(self, body: RolloutBody, key: Key, idempotency_key: str | None) -> tuple[Rollout, bool]:
        """Begin a rollout; the same idempotency key gives the same rollout.

        Returns:
            It, and whether it is new.

        Raises:
            ApiError: unknown environment or tasks, no tokens, too many rollouts, or the idempotency key is used.
            ConfigError: settings outside their range.
        """
        core = self.core
        if core.draining:
            raise ApiError(503, "the service is shutting down; go to another one", "draining", headers={"Retry-After": "5"})
        core.rates.check(key)
        spec = await core.envs.find(body.env)
        splits = await core.splits(spec)
        if body.split not in splits:
            raise bad(f"{spec.id} has no split {body.split!r}; there are {', '.join(splits)}", "split")
        self._player.context(body, key, core.gate)  # what cannot be played is refused now
        if body.run is not None:
            await core.own_run(body.run, key)
        request = body.model_dump(exclude_none=True)
        wanted = indices(body, splits[body.split])
        row: dict[str, Any] = dict(id=f"r_{secrets.token_hex(8)}", key=key.id, idempotency_key=idempotency_key)
        counts = {"groups": len(wanted), "done": 0, "unusable": 0, "failed": 0, "trajectories": 0}
        row |= dict(request=request, state="queued", counts=counts, created_at=time.time())
        rollout, new = await core.ask(self.store.insert, row, core.config.max_rollouts)
        if not new and rollout.request != request:
            message = f"Idempotency-Key {idempotency_key!r} was used for another request, rollout {rollout.id}"
            raise ApiError(409, message, "idempotency_conflict", "Idempotency-Key")
        if new:
            core.events.add(rollout.topic, "queued", groups=len(wanted))
            self._begin(rollout, key)
        return rollout, new

    async def resume(self) -> None:
        """Go on with what was under way when this service ended, and from now on with what other services leave."""
        await self._take()
        self._keeping = asyncio.get_running_loop().create_task(keep(self._turn, "rollouts"))

    async def get(self, id: str, key: Key) -> Rollout:
        """A rollout of this key, or any for an admin.

        Raises:
            ApiError: there is none.
        """
        playing = self._playing.get(id)
        rollout = playing[0] if playing is not None else await self.core.ask(self.store.find, id)
        if rollout is None or (rollout.key != key.id and not key.may("admin")):
            raise unknown("rollout", id)
        return rollout

    async def list(self, key: Key, limit: int) -> list[Rollout]:
        """The rollouts of a key, newest first; all for an admin."""
        found = await self.core.ask(self.store.newest, None if key.may("admin") else key.id, limit)
        return [self._playing[rollout.id][0] if rollout.id in self._playing else rollout for rollout in found]

    async def cancel(self, rollout: Rollout, why: str | None = None) -> Rollout:
        """End it; generation in flight is aborted, groups that are durable stay.

        Args:
            rollout: to end.
            why: kept as its error; None: its owner wished it.
        """
        playing = self._playing.get(rollout.id)
        if playing is None and rollout.active:
            rollout = await self._elsewhere(rollout, "cancelled")
            if rollout.state == "cancelled":
                self.core.events.add(rollout.topic, "finished", state=rollout.state, counts=rollout.counts, error=None)
        elif playing is not None:
            rollout, task = playing
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_SECONDS)
            if rollout.active:
                await self._player.end(rollout, "cancelled", why)
        return rollout

    async def _cancel_with_its_key(self, rollout: Rollout, why: str) -> None:
        try:
            await self.cancel(rollout, why)
        except RelaxError as error:  # it is not gone on with, as its key does not work
            logger.warning("a rollout's end was not noted: %s", error, extra={FIELDS: {"rollout": rollout.id}})

    async def pause(self, rollout: Rollout) -> Rollout:
        """Begin no episode of it and send no model call until `unpause`; what is under way ends. Again changes nothing.

        Raises:
            ApiError: it is over.
        """
        return await self._switch(rollout, "paused", "paused")

    async def unpause(self, rollout: Rollout) -> Rollout:
        """Go on with it; one that is not paused is left as it is.

        Raises:
            ApiError: it is over.
        """
        return await self._switch(rollout, "running", "resumed")

    async def _switch(self, rollout: Rollout, state: str, kind: str) -> Rollout:
        async with self._switching:
            gate, playing = self._gates.get(rollout.id), self._playing.get(rollout.id)
            rollout = playing[0] if playing is not None else rollout
            was = rollout.state
            if rollout.active and (was == "paused") != (state == "paused"):
                if gate is None:
                    rollout = await self._elsewhere(rollout, state)
                else:
                    self._hold(rollout, state == "paused")
                    await self._player.save(rollout, state)
            if not rollout.active:
                raise ApiError(409, f"rollout {rollout.id} is over ({rollout.state})", "rollout_over")
            if rollout.state != was:
                self.core.events.add(rollout.topic, kind, by="rollout")
            return rollout

    async def _elsewhere(self, rollout: Rollout, state: str) -> Rollout:
        """Switch one that another server plays, or none at the moment; that one sees it with its next beat."""
        return await self.core.ask(self.store.switch, rollout.id, state)

    async def close(self) -> None:
        """Stop playing; what was under way goes on when the service is started again, or at another server."""
        if self._keeping is not None:
            self._keeping.cancel()
        tasks = [task for _, task in self._playing.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=DATABASE_LIMIT)
        with contextlib.suppress(RelaxError):  # else it is free when it was not renewed for long enough
            await self.core.ask(self.store.release)

    # ------------------------------------------------------------------------------------------------- who plays what

    async def _turn(self) -> None:
        await self._renew()
        if not self.core.draining:
            await self._take()

    async def _take(self) -> None:
        """Play what is free. An environment that this service does not know is left to others."""
        core = self.core
        free = [found for found in await core.ask(self.store.free) if found[0] not in self._playing]
        known = {env for env in {env for _, env, _ in free} if await core.envs.knows(env)}
        ids = [id for id, env, own in free if own or env in known]
        if not ids:
            return

        def take() -> list[tuple[Rollout, Key | None]]:
            return [(rollout, core.keys.by_id(rollout.key)) for rollout in self.store.take(ids)]

        for rollout, key in await core.ask(take):
            logger.info("going on with a rollout", extra={FIELDS: {"rollout": rollout.id}})
            if key is None:
                await self._player.end(rollout, "cancelled", "its key was revoked or has expired")
            else:
                self._begin(rollout, key)

    async def _renew(self) -> None:
        """Hold on to what is played here; what was switched elsewhere follows, and what was lost is stopped."""
        async with self._switching:
            playing = [rollout for rollout, _ in self._playing.values() if rollout.active]
            states = await self.core.ask(self.store.renew, playing) if playing else {}
            for rollout in playing:
                found = self._playing.get(rollout.id)
                if found is None or not rollout.active:
                    continue  # it ended meanwhile
                state = states.get(rollout.id)
                if state not in ACTIVE:
                    level, how = (logging.INFO, state) if state else (logging.WARNING, "taken by another service")
                    logger.log(level, "a rollout was %s", how, extra={FIELDS: {"rollout": rollout.id}})
                    found[1].cancel()
                elif (state == "paused") != (rollout.state == "paused"):
                    self._hold(rollout, state == "paused")
                    rollout.state = state

    # ------------------------------------------------------------------------------------------------------- playing

    def _begin(self, rollout: Rollout, key: Key) -> None:
        gate = self._gates[rollout.id] = Gate(self.core.gate)
        self._hold(rollout, rollout.state == "paused")
        task = asyncio.get_running_loop().create_task(self._player.play(rollout, key, gate))
        self._playing[rollout.id] = rollout, task
        if key is not LOCAL:
            over = self.core.watch.use(key.id, lambda why: self.core.spawn(self._cancel_with_its_key(rollout, why)))
            task.add_done_callback(lambda _: over())
        task.add_done_callback(lambda _: self._forget(rollout))

    def _forget(self, rollout: Rollout) -> None:
        self._playing.pop(rollout.id, None)
        self._gates.pop(rollout.id, None)
        self._starts.forget(rollout)

    def _hold(self, rollout: Rollout, paused: bool) -> None:
        """Begin no episode of it, or go on."""
        gate = self._gates[rollout.id]
        if paused:
            gate.clear()
            self._starts.pause(rollout)
        else:
            gate.set()
            self._starts.unpause(rollout)
