"""What all parts of the service share: engines, journal, media, keys, events, and the environments' contexts."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from relax_sdk.config import RolloutConfig
from relax_sdk.errors import ConfigError, EpisodeTimeout, JournalError
from relax_sdk.media import Kind, MediaRef, MediaStore
from relax_sdk.registry import EnvSpec
from relax_sdk.run_lock import Holder
from relax_sdk.session import Agent
from relax_sdk.tasks import KeptRows, task_splits
from relax_sdk.trajectory import Group
from relax_server.api.background import Background
from relax_server.api.door.refusals import Refusals
from relax_server.api.engine_roster import EngineRoster
from relax_server.api.environments.hub import EnvHub
from relax_server.api.environments.sandbox import Sandbox
from relax_server.api.events import EventLog
from relax_server.api.freeform import FREE
from relax_server.api.identity import Identity
from relax_server.api.key_watch import KeyWatch
from relax_server.api.keys import KNOWN_SECONDS, Key, KeyRing
from relax_server.api.media.decoders import MediaDecoders
from relax_server.api.metrics import METRICS, Metrics, merged
from relax_server.api.pausing import Gate, GatedSlots, Slots
from relax_server.api.private import private_folder
from relax_server.api.quotas import MEDIA_BYTES, TOKENS, WORKER_SECONDS, FairSlots, KeyMeter, KeyRates
from relax_server.api.settings import ServiceConfig
from relax_server.api.workers.place import WorkerPlace
from relax_server.api.workers.quotas import SharedRates, shared_slots
from relax_server.gateway.errors import ApiError
from relax_server.journal import open_journal
from relax_server.journal.claims import Held
from relax_server.journal.sql import SqlJournal
from relax_server.rollout.commits import Committer
from relax_server.rollout.context import RolloutContext, default_agent
from relax_server.rollout.fair_threads import FairThreads
from relax_server.rollout.media import MediaIntake
from relax_server.rollout.otel_traces import open_traces
from relax_server.rollout.policy import EnginePolicies
from relax_server.rollout.pool import EnginePool
from relax_server.rollout.rendering import Renderer
from relax_server.rollout.stats import Tally
from relax_server.rollout.threads import CallThreads
from relax_server.viewer.named import note_served

if TYPE_CHECKING:
    from relax_server.models.processor import Processor

ENV_THREADS, MEDIA_THREADS, DATABASE_THREADS = 512, 4, 4
DATABASE_LIMIT = 60.0
"""Seconds that the database may take for one call."""

READ_BYTES = 1 << 20
"""Bytes that an answer is reckoned to hold before it is known."""
MEDIA_LIMIT = 120.0
"""Seconds to hash or to write one media item."""

T = TypeVar("T")


class ServiceCore:
    """The parts of a running service. Belongs to one event loop.

    Args:
        config: its settings.
        processor: of the model that the engines serve.
        pool: of engines.
        place: of this process among the workers of the service; None: it is the only one.

    Raises:
        ConfigError: it would be open to other machines without a key.
        JournalError: the journal cannot be opened.
    """

    def __init__(self, config: ServiceConfig, processor: Processor, pool: EnginePool, place: WorkerPlace | None = None) -> None:
        self.config, self.processor, self.pool, self.place = config, processor, pool, place or WorkerPlace()
        self.engines = EngineRoster(pool, self.place)
        self.max_body = config.max_body
        journal = open_journal(config.journal or config.folder / "journal.db")
        if not isinstance(journal, SqlJournal):
            raise ConfigError(f"{config.journal}: the service needs an SQL journal")
        self.journal = journal
        self.keys = KeyRing(journal)
        self.locked = not config.no_keys and self.keys.any()
        """Whether callers must show a key, as far as is known; see `wants_keys`."""
        self._looked = 0.0
        if config.exposed and not self.locked:
            journal.close()
            how = f"proxies = {', '.join(config.proxies)}" if config.loopback else f"host = {config.host}"
            raise ConfigError(
                f"{how}: other machines could reach the service, and there is no key yet; "
                f"make one with `relax keys add NAME --folder {config.folder}`"
            )
        self.refusals = Refusals(config.door.refusals_per_second)
        self.strangers = asyncio.Semaphore(1)
        """Held while a key is looked up that was never seen to work: guesses leave the database to the others."""
        self.identity = Identity(config.folder, self.place.index)
        note_served(config.folder, processor.path)
        self.holder = dataclasses.replace(Holder.here(), id=self.identity.id)
        """This service, as others see it that share the journal."""
        self.store = MediaStore(config.folder / "media")
        self.threads = CallThreads("environment", ENV_THREADS)
        self.media_threads = CallThreads("media", MEDIA_THREADS)
        self.work = FairThreads("requests")
        """Threads for large requests, shared fairly by the keys."""
        self.database = CallThreads("database", DATABASE_THREADS)
        self.watch = KeyWatch(self.keys, self.ask, self.wants_keys)
        self.media_slots = FairSlots(MEDIA_THREADS)
        """Places in these threads for the media of episodes: one key has half of them at most."""
        self.decoders = MediaDecoders(config.decoder_limits)
        """Where media are decoded that came over the network."""
        self.events = EventLog(journal, self.database)
        logs = config.folder / "logs"
        sandbox = Sandbox(config.folder, config.trust_uploads)
        self.envs = EnvHub(
            *(journal, self.store, self.database, self.media_threads, logs, config.worker_limits, sandbox),
            take=self.take_media,
            meter=self.worker_meter,
            place=self.place,
        )
        self.slots = shared_slots(config.concurrency, self.place)
        self.turn = asyncio.Lock()
        """See `RolloutContext.turn`."""
        self.rates = KeyRates(TOKENS)
        self.media_rates = KeyRates(MEDIA_BYTES)
        self.worker_rates = KeyRates(WORKER_SECONDS)
        if not self.place.alone:
            SharedRates(self.place, [self.rates, self.media_rates, self.worker_rates])
        self.background = Background()
        self.tally = Tally()
        self.metrics = Metrics()
        self.traces = open_traces(config.traces, config.name or "service", config.model)
        self.place.on(METRICS, lambda message: {"families": self.metrics.families()})
        self.gate = Gate()
        """Closed while the service is paused."""
        self.admission = Gate()
        """Closed when no episode may begin any more."""
        self.renderer = Renderer(processor)
        self.intake = MediaIntake(self.store, processor, self.media_threads, config.rollout.step_timeout)
        self._committer = Committer(journal, "service")
        self._splits: dict[str, tuple[EnvSpec, dict[str, KeptRows]]] = {}
        self._refs: dict[tuple[Kind | None, str], MediaRef] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.draining = False
        """No new episodes are begun."""

    # -------------------------------------------------------------------------------------------------- environments

    def spec(self, env: str) -> EnvSpec:
        """An environment that is known here; see `EnvHub.spec`."""
        return self.envs.spec(env)

    async def splits(self, spec: EnvSpec) -> dict[str, KeptRows]:
        """The tasks of an environment by split; opened once, and again when another has taken its name."""
        known = self._splits.get(spec.id)
        if known is None or known[0] is not spec:
            opened = await self.media_threads.call(lambda: task_splits(spec.load_tasks()), limit=DATABASE_LIMIT)
            found = {name: KeptRows(split) for name, split in opened.items()}
            known = self._splits.get(spec.id)
            if known is None or known[0] is not spec:
                known = self._splits[spec.id] = spec, found
        return known[1]

    def context(
        self,
        run: str,
        spec: EnvSpec,
        config: RolloutConfig,
        key: Key,
        agent: Agent | None = None,
        routes: bool = False,
        gate: Gate | None = None,
        slots: Slots | None = None,
    ) -> RolloutContext:
        """What the episodes of one request share.

        `gate` is the request's own, inside the service's; `slots` are places in place of the key's. Calls of an agent outside
        are refused while their key has no tokens left, those of the service's own agents wait.

        Raises:
            ConfigError: the environment shows media that the model does not take.
            RegistryError: the environment cannot be loaded.
        """
        gate, env_class = gate or self.gate, spec.load()
        missing = set(env_class.modalities) - self.processor.modalities
        if missing:
            takes = ", ".join(sorted(self.processor.modalities)) or "text only"
            raise ConfigError(f"{spec.id} shows {', '.join(sorted(missing))}, but the model takes {takes}")
        urgent = agent is not None
        stored = KeyMeter(self.media_rates, key, self.background, urgent)
        intake = self.intake.share(self.media_slots.of(key.id, MEDIA_THREADS // 2), stored)
        meter = KeyMeter(self.rates, key, self.background, urgent)
        return RolloutContext(
            run=run,
            spec=spec,
            env_class=env_class,
            config=config,
            agent=agent or default_agent(env_class),
            policies=EnginePolicies(
                *(self.renderer, intake, self.pool, gate, routes, self.work.of(key.id), meter)  # type: ignore[arg-type]
            ),
            threads=self.threads,
            slots=GatedSlots(slots or self.slots.of(key.id, key.episodes), Gate(gate, self.admission)),  # type: ignore[arg-type]
            observes=spec is not FREE,
            tally=self.tally,
            turn=self.turn,
            traces=self.traces,
        )

    def rollout_config(self, changes: dict[str, Any]) -> RolloutConfig:
        """The service's time limits and sizes with a request's changes.

        Raises:
            ConfigError: a value outside its range.
        """
        return dataclasses.replace(self.config.rollout, **{k: v for k, v in changes.items() if v is not None})

    async def measured(self) -> bytes:
        """The metrics of all workers in Prometheus' format; without those of a worker that does not answer just now."""
        if self.place.alone:
            return self.metrics.text()
        others = await self.place.ask_others(METRICS)
        told = {worker: answer["families"] for worker, answer in others.items()}
        return merged({self.place.index: self.metrics.families()} | told)

    @property
    def status(self) -> str:
        """`ok`, `paused` or `draining`."""
        return "draining" if self.draining else "ok" if self.gate.is_set() else "paused"

    # --------------------------------------------------------------------------------------------------------- media

    async def media_ref(self, sha256: str, kind: Kind | None = None) -> MediaRef | None:
        """The reference of a stored item, as `MediaStore.find` gives it; None: not here.

        Raises:
            MediaError: not a sha256.
        """
        known = self._refs.get((kind, sha256))
        if known is None:
            known = await self.media_threads.call(self.store.find, sha256, kind, limit=DATABASE_LIMIT)
            if known is not None:
                self._refs[kind, sha256] = known
        return known

    async def take_media(self, kind: Kind, data: bytes, owner: str) -> MediaRef:
        """Have an item that came over the network decoded by a process that may die of it, and store it.

        Args:
            kind: what it is to be.
            data: encoded.
            owner: id of the key that it came with.

        Raises:
            MediaError: refused, or the store cannot be written.
            ApiError: too many of this key wait already, or it has used up a quota.
        """
        digest = await self.media_threads.call(hashlib.sha256, data, limit=MEDIA_LIMIT)
        ref = await self.media_ref(digest.hexdigest(), kind)
        if ref is None or ref.kind != kind:
            stored = KeyMeter(self.media_rates, await self.charged(owner))
            await stored.reserve(len(data))
            try:
                ref = await self.decoders.check(kind, data, owner, await self.worker_meter(owner))
                await self.media_threads.call(self.store.write, ref, data, limit=MEDIA_LIMIT)
            except BaseException:
                stored.give_back(len(data))
                raise
            self._refs[kind, ref.sha256] = ref
        return ref

    # ---------------------------------------------------------------------------------------------------------- keys

    async def charged(self, owner: str) -> Key:
        """The key with an id, for its quotas.

        Raises:
            JournalError: there never was one, or the database cannot be asked.
        """
        return self.keys.charged_before(owner) or await self.ask(self.keys.charged, owner)

    async def worker_meter(self, owner: str) -> KeyMeter:
        """Who the time of processors is charged to that goes by in the name of a key.

        Raises:
            JournalError: as `charged`.
        """
        return KeyMeter(self.worker_rates, await self.charged(owner))

    async def wants_keys(self) -> bool:
        """Whether callers must show a key: from the first one on, also if it was made while the service runs, and for ever."""
        now = asyncio.get_running_loop().time()
        if not self.locked and not self.config.no_keys and now - self._looked > KNOWN_SECONDS:
            self._looked = now
            self.locked = await self.ask(self.keys.any)
        return self.locked

    # ------------------------------------------------------------------------------------------------------ database

    async def ask(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call something that waits for the database.

        Raises:
            JournalError: what it raises, or it did not come back in time.
        """
        try:
            return await self.database.call(function, *arguments, limit=DATABASE_LIMIT)
        except EpisodeTimeout as error:
            message = f"the database did not answer within {DATABASE_LIMIT:g} s; what was asked for may be done all the same"
            raise JournalError(message) from error

    async def read(self, key: Key, function: Callable[[], T]) -> T:
        """Call something that reads the database and makes an answer of what it finds, large as it may be: in threads that the
        keys share fairly.

        Raises:
            ServiceUnavailable: too much of the key's work waits already.
            JournalError: what it raises, or it did not come back in time.
        """
        try:
            return await self.work.call(key.id, READ_BYTES, function)
        except EpisodeTimeout as error:
            raise JournalError("the database did not answer in time") from error

    async def own_run(self, run: str, key: Key) -> None:
        """Use the name of a run for a key; it belongs to the key that uses it first.

        Raises:
            ApiError: it is another's.
        """
        if self.journal.known_owner(run) != key.id and not await self.ask(self.journal.own, run, key.id):
            message = f"run = {run!r}: the name belongs to another key, or to a training run; choose another"
            raise ApiError(409, message, "run_taken", "run")

    async def commit(self, group: Group, run: str, split: str, key: str, held: Held | None = None) -> bool:
        """Make a group durable that was made for a key, and under a claim; False when it was there already.

        Raises:
            ClaimLost: another service has what it was made for, or that is over.
            UnstorableError: it cannot be stored, however often it is tried.
            JournalError: it is not known to be durable; committing it again is safe.
        """
        return await self._committer.commit(group, split, run, key, held)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that no request waits for; it is waited for when the service ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Let everything go; episodes must have ended."""
        if self._background:
            await asyncio.wait(self._background, timeout=DATABASE_LIMIT)
        await self.envs.close()
        await self.events.close()
        await self._committer.close()
        await self.pool.close()
        for threads in (self.threads, self.media_threads, self.work, self.database):
            threads.close()
        self.decoders.close()
        await asyncio.to_thread(self.traces.close)
        self.journal.close()
        self.identity.close()


def folder_of(config: ServiceConfig) -> Path:
    """The service's folder, made if needed, and nobody else's.

    Raises:
        ConfigError: it cannot be made.
    """
    private_folder(config.folder)
    try:
        (config.folder / "media").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder {config.folder} cannot be made ({error.strerror}); name another") from error
    return config.folder
