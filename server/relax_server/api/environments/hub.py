"""All environments of the service: installed, registered and hosted ones."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from relax_sdk.errors import EnvError, RelaxError
from relax_sdk.hosting.protocol import Description
from relax_sdk.media import Kind, MediaRef, MediaStore
from relax_sdk.registry import NAME, EnvSpec, get_spec, list_envs
from relax_server.api.environments.elsewhere import OtherWorkers
from relax_server.api.environments.limits import WorkerLimits
from relax_server.api.environments.relay_link import RelayLink
from relax_server.api.environments.sandbox import Sandbox, SandboxUnavailable
from relax_server.api.environments.sockets import AWAY_SECONDS, SocketLink
from relax_server.api.environments.source import EnvSource, python_version
from relax_server.api.environments.store import EnvStore
from relax_server.api.environments.worker import WorkerLink
from relax_server.api.freeform import FREE
from relax_server.api.keys import Key
from relax_server.api.quotas import KeyMeter
from relax_server.api.workers.place import WorkerPlace
from relax_server.gateway.errors import ApiError, bad, unknown
from relax_server.journal.sql import SqlJournal
from relax_server.rollout.hosted import HostLink, InThread, TakeMedia, hosted_spec
from relax_server.rollout.threads import CallThreads

logger = logging.getLogger(__name__)

NAME_LENGTH = 100
"""What an environment may be called."""
FRESH_SECONDS = 1.0
"""How long what the database said of a name is believed."""
KEPT_NAMES = 10_000
LOOK_SECONDS = 1.0
"""Seconds between looks for hosts that have been away for too long."""


@dataclass(frozen=True)
class Entry:
    """An environment that came from outside."""

    spec: EnvSpec
    link: WorkerLink | SocketLink | RelayLink
    owner: str
    """Id of a key."""
    kind: str
    """`import`, `package`, `upload`, `hosted`, or `relayed`: hosted at another worker."""
    description: Description


class EnvHub:
    """Finds environments by name. Belongs to one event loop.

    Registered ones are in the database and thus known to every server on it; hosted ones only to the server that their host
    is connected to, and to all its workers.

    Args:
        journal: whose database it is.
        store: media go here.
        database: waits for the database.
        threads: wait for the disk.
        logs: folder of the workers' logs.
        limits: of every worker.
        sandbox: in which workers run.
        take: checks and stores an item, given the id of the key that it came with.
        meter: finds who is charged for the workers of a key, given its id.
        place: of this process among the workers of the service.
    """

    def __init__(
        self,
        journal: SqlJournal,
        store: MediaStore,
        database: CallThreads,
        threads: CallThreads,
        logs: Path,
        limits: WorkerLimits,
        sandbox: Sandbox,
        take: Callable[[Kind, bytes, str], Awaitable[MediaRef]],
        meter: Callable[[str], Awaitable[KeyMeter]],
        place: WorkerPlace,
    ) -> None:
        self._known, self._store = EnvStore(journal, database), store
        self._in_thread: InThread = threads.call
        self._logs, self.limits, self._sandbox = logs, limits, sandbox
        self._take, self._meter = take, meter
        self.others = OtherWorkers(place, store.root, self._hosted_here, lambda env: self._looked.pop(env, None))
        self._entries: dict[str, Entry] = {}
        self._looked: dict[str, float] = {}
        self._looking: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()
        """Set, and replaced, when an environment comes or goes."""

    # ------------------------------------------------------------------------------------------------------- finding

    def spec(self, env: str) -> EnvSpec:
        """An environment that is known here; `none` is none at all. Nothing is imported because a request names it.

        Raises:
            ApiError: unknown.
        """
        if env in self._entries:
            return self._entries[env].spec
        if _installed(env):
            return get_spec(env) if env != FREE.id else FREE
        known = sorted({spec.id for spec in list_envs()} | set(self._entries))
        raise unknown("environment", env, f": there are {', '.join(known)}")

    async def find(self, env: str) -> EnvSpec:
        """As `spec`, but asks the database for one that was registered elsewhere, and whether it still is."""
        entry = self._entries.get(env)
        fresh = time.monotonic() - self._looked.get(env, -FRESH_SECONDS) < FRESH_SECONDS
        if not fresh and not _installed(env) and (entry is None or entry.kind != "hosted"):
            await self._refresh(env)
        return self.spec(env)

    async def knows(self, env: str) -> bool:
        """Whether `find` finds it."""
        try:
            await self.find(env)
        except RelaxError:
            return False
        return True

    async def require_time(self, env: str, patient: bool = False) -> None:
        """Raise if an environment's worker may not be asked now, as the key that registered it has used up its seconds.

        Args:
            env: its name.
            patient: wait until it may be.

        Raises:
            ApiError: 429, with the seconds to wait.
        """
        link = self.link(env)
        if isinstance(link, WorkerLink):
            await link.require_time(patient)

    def link(self, env: str) -> HostLink | None:
        """The way to an environment that runs elsewhere; None: it does not."""
        entry = self._entries.get(env)
        return entry.link if entry is not None else None

    def description(self, env: str) -> Description | None:
        """What is known of an environment that runs elsewhere; None for others."""
        entry = self._entries.get(env)
        return entry.description if entry is not None else None

    def rows(self) -> list[dict[str, Any]]:
        """What there is, for people."""
        rows = []
        for spec in list_envs():
            try:
                cls = spec.load()
            except RelaxError:
                continue
            rows.append({"id": spec.id, "kind": "installed", "modalities": sorted(cls.modalities), "version": cls.version})
            rows[-1]["doc"] = cls.__doc__
        for name, entry in sorted(self._entries.items()):
            about = entry.description
            row = {"id": name, "kind": entry.kind, "modalities": about.modalities, "version": about.version, "doc": about.doc}
            rows.append(row | {"splits": about.splits, "tools": [tool["function"]["name"] for tool in about.tools]})
            if isinstance(entry.link, WorkerLink):
                rows[-1] |= {"workers_ended": entry.link.ended, "last_end": entry.link.how or None}
            elif isinstance(entry.link, SocketLink):
                rows[-1] |= {"connected": entry.link.there}
        return rows

    # --------------------------------------------------------------------------------------------------- registering

    async def register(self, source: EnvSource, key: Key) -> Description:
        """Take an environment in: its worker is started, and must be able to describe it.

        Registering a name again replaces it, as a notebook's cell does; episodes under way fail.

        Raises:
            ApiError: the name is taken by an installed environment, or by somebody else's; or there is no sandbox for it here.
            EnvError: it cannot be loaded.
        """
        self._claim(source.id, key)
        if source.kind == "upload" and source.python != python_version():
            raise bad(
                f"pickled by Python {source.python}; this service runs {python_version()}, which cannot read it", "python"
            )
        await self._refresh(source.id)
        self._claim(source.id, key)
        link = self._worker(source, key.id)
        try:
            description = await link.describe()
            spec = hosted_spec(description, link)
            row = dict(id=source.id, key=key.id, source=msgspec.msgpack.encode(source), created_at=time.time())
            row |= dict(description=msgspec.msgpack.encode(description))
            await self._known.write(row, key)
        except SandboxUnavailable as error:
            raise ApiError(403, str(error), "uploads_refused") from error
        except EnvError as error:
            await link.close()
            raise bad(f"the environment cannot be loaded: {error}", code="environment_error") from error
        except BaseException:
            await link.close()
            raise
        await self._replace(Entry(spec, link, key.id, source.kind, description))
        return description

    async def remove(self, env: str, key: Key) -> None:
        """Forget an environment; episodes under way fail.

        Raises:
            ApiError: there is none that the key may remove.
        """
        await self.find(env)
        entry = self._entries.get(env)
        if entry is None:
            raise bad(f"{env} is installed at the service and cannot be removed", "id")
        self._require_owner(entry, key)
        if isinstance(entry.link, WorkerLink):
            await self._known.delete(env)
        await self._forget(env)

    def attach(self, description: Description, token: str | None, key: Key) -> SocketLink:
        """A host has connected: a new one, or one that was away.

        Raises:
            ApiError: the name is taken.
            EnvError: the description cannot be right.
        """
        if len(description.id) > NAME_LENGTH or not re.fullmatch(NAME, description.id):
            about = f"must match {NAME} with at most {NAME_LENGTH} characters"
            raise bad(f"an environment's name {about}, got {description.id[:120]!r}", "id")
        entry = self._entries.get(description.id)
        if entry is not None and isinstance(entry.link, SocketLink):
            if token == entry.link.token and not entry.link.given_up:
                return entry.link
            self._require_owner(entry, key)
            if entry.link.there:
                raise ApiError(409, f"{description.id} is hosted by another process already; choose another id", "name_taken")
            entry.link.give_up()
        elif entry is not None:
            raise ApiError(409, f"{description.id} is registered here already; choose another id", "name_taken")
        self._claim(description.id, key)
        link = SocketLink(description, key.id, self._store, self._in_thread, self._take_for(key.id))
        self._entries[description.id] = Entry(hosted_spec(description, link), link, key.id, "hosted", description)
        self._tell(description.id)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return link

    async def leave(self, link: SocketLink) -> None:
        """A host has taken its leave: its episodes fail."""
        entry = self._entries.get(link.env)
        if entry is not None and entry.link is link:
            await self._forget(link.env)

    async def expect(self, env: str, seconds: float) -> EnvSpec:
        """As `find`, but waits for the host of an environment to come back, as after the service was started again.

        Raises:
            ApiError: unknown, and it did not come.
        """
        try:
            async with asyncio.timeout(seconds):
                while True:
                    changed = self.changed
                    with contextlib.suppress(ApiError):
                        return await self.find(env)
                    await changed.wait()
        except TimeoutError:
            return self.spec(env)

    async def close(self) -> None:
        """End all workers, and let hosts go."""
        if self._looking is not None:
            self._looking.cancel()
        for entry in self._entries.values():
            if isinstance(entry.link, SocketLink):
                await entry.link.drop()
            else:
                await entry.link.close()

    # --------------------------------------------------------------------------------------------------------- parts

    def _worker(self, source: EnvSource, owner: str) -> WorkerLink:
        log = self._logs / f"env-{quote(source.id, safe='')}.log"
        meter = functools.partial(self._meter, owner)
        return WorkerLink(source, self.limits, log, self._store, self._in_thread, self._sandbox, self._take_for(owner), meter)

    def _take_for(self, owner: str) -> TakeMedia:
        return lambda kind, data: self._take(kind, data, owner)

    def _claim(self, env: str, key: Key) -> None:
        if _installed(env):
            raise ApiError(409, f"{env} is the name of an environment that is installed; choose another", "name_taken", "id")
        entry = self._entries.get(env)
        if entry is not None:
            self._require_owner(entry, key)

    def _require_owner(self, entry: Entry, key: Key) -> None:
        if entry.owner != key.id and not key.may("admin"):
            raise ApiError(409, f"{entry.spec.id} belongs to another key; choose another id", "name_taken", "id")

    async def _replace(self, entry: Entry) -> None:
        old = self._entries.get(entry.spec.id)
        self._entries[entry.spec.id] = entry
        self._tell(entry.spec.id)
        if old is not None:
            await self._let_go(old)

    async def _forget(self, env: str) -> None:
        old = self._entries.pop(env, None)
        if old is not None:
            self._tell(env)
            await self._let_go(old)

    async def _let_go(self, entry: Entry) -> None:
        if isinstance(entry.link, SocketLink):
            entry.link.give_up()
            await entry.link.drop()
        else:
            await entry.link.close()

    def _tell(self, env: str) -> None:
        self.others.tell(env)
        told, self.changed = self.changed, asyncio.Event()
        told.set()

    async def _look(self) -> None:
        """Give up hosts that stay away."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for env, entry in list(self._entries.items()):
                link = entry.link
                away = link.away_since if isinstance(link, SocketLink) else None
                if away is not None and time.monotonic() - away > AWAY_SECONDS:
                    await self._forget(env)

    async def _refresh(self, env: str) -> None:
        """Learn from the database what other servers have registered, replaced or removed under a name."""
        found = await self._known.read(env)
        if len(self._looked) > KEPT_NAMES:
            self._looked.clear()
        self._looked[env] = time.monotonic()
        entry = self._entries.get(env)
        if found is None:
            await self._relay(env, entry)
            return
        owner, source, description = found
        if entry is not None and isinstance(entry.link, WorkerLink) and entry.link.source == source:
            return
        link = self._worker(source, owner)
        await self._replace(Entry(hosted_spec(description, link), link, owner, source.kind, description))

    async def _relay(self, env: str, entry: Entry | None) -> None:
        """Find an environment that nobody has registered at the worker that its host is connected to, or forget it."""
        if entry is not None and entry.kind == "hosted":
            return
        found = await self.others.find(env, entry.link if entry is not None else None)
        if found is None:
            await self._forget(env)
        elif entry is None or entry.link is not found[0]:
            link, owner, description = found
            await self._replace(Entry(hosted_spec(description, link), link, owner, "relayed", description))

    def _hosted_here(self, env: str) -> SocketLink | None:
        entry = self._entries.get(env)
        return entry.link if entry is not None and isinstance(entry.link, SocketLink) else None

    async def load(self) -> None:
        """Learn which names are registered, at whichever server, and which no more. Workers start when they are needed."""
        names = set(await self._known.ids())
        here = {env for env, entry in self._entries.items() if entry.kind != "hosted"}
        for env in sorted(names ^ here):
            try:
                await self._refresh(env)
            except RelaxError as error:
                logger.warning("environment %s is left out: %s", env, error)


def _installed(env: str) -> bool:
    return env == FREE.id or any(spec.id == env for spec in list_envs())
