"""Training runs: submitted, carried out in processes of their own, and resumed after whatever ended them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_sdk.algorithm import ALGORITHMS
from relax_sdk.config import RunConfig, run_config_from_dict
from relax_sdk.errors import ClaimLost, ConfigError, RelaxError
from relax_sdk.hosting.protocol import Description
from relax_server.api.core import DATABASE_LIMIT, ServiceCore
from relax_server.api.environments.sockets import SocketLink
from relax_server.api.freeform import FREE
from relax_server.api.holding import Holding, keep
from relax_server.api.keys import LOCAL, Key
from relax_server.api.logs import FIELDS
from relax_server.api.schemas import RunBody
from relax_server.api.trainings.child import STOP_SECONDS as CHECKPOINT_SECONDS
from relax_server.api.trainings.child import RunProcess
from relax_server.api.trainings.made import MadeByRuns
from relax_server.api.trainings.process import INTERRUPTED
from relax_server.api.trainings.protocol import Relayed, Start, Told
from relax_server.api.trainings.store import ACTIVE, Training, TrainingStore
from relax_server.gateway.errors import ApiError, bad, unknown
from relax_server.models.catalog import BUILDERS

logger = logging.getLogger(__name__)

DESCRIPTION = "env.msgpack"
"""The file of a run's folder that says what its environment is, if it comes from outside."""
CANCEL_SECONDS = 5.0
"""Seconds in which a run that is cancelled may end before its owner is answered."""
STOP_SECONDS = 20.0
"""Seconds for a run to end with the service; one that needs longer for its checkpoint goes on from the one before."""
REVOKED_SECONDS = 2.0
"""Seconds for a run to end whose key works no more; it is in time for a checkpoint only by chance."""
OWN_TRACKERS = {"tensorboard"}
"""Trackers that write into the folder of the run alone."""
RESTARTS, RESTART_SECONDS = 3, 60.0
"""How often a run's process that was killed from outside is started again without a step in between, and the pause before."""


class TrainingHub:
    """All runs of this server, and those that another one left, if they can go on here.

    Args:
        core: of the service.
    """

    def __init__(self, core: ServiceCore) -> None:
        self.core = core
        self.folder = core.config.folder / "runs"
        self.made = MadeByRuns(core, self.folder, self._start, self._log)
        self.store = TrainingStore(core.journal, core.identity.id, Holding("training", core.holder))
        self._places = asyncio.Semaphore(core.config.max_runs)
        self._active: dict[str, tuple[Training, asyncio.Task[None]]] = {}
        self._processes: dict[str, RunProcess] = {}
        self._cancelled: dict[str, str | None] = {}
        """Runs that were told to end, and why if it was not their owner's wish."""
        self._relays: dict[str, tuple[str, str]] = {}
        """Environment and secret by the process that plays it."""
        self._closing = False
        self._keeping: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------------------- requests

    async def submit(self, body: RunBody, key: Key, idempotency_key: str | None) -> tuple[Training, bool]:
        """Begin a run; the same idempotency key gives the same run.

        Returns:
            It, and whether it is new.

        Raises:
            ApiError: unknown environment or model, no right, too many runs, or the idempotency key was used for something else.
            ConfigError: settings outside their range.
        """
        core = self.core
        if core.draining:
            raise ApiError(503, "the service is shutting down; go to another one", "draining", headers={"Retry-After": "5"})
        if await core.envs.find(body.env) is FREE:
            raise bad("a run needs an environment, which none is not", "env")
        self._check_rights(body, key)
        request = body.model_dump(exclude_none=True)
        row: dict[str, Any] = dict(id=f"t_{secrets.token_hex(8)}", key=key.id, idempotency_key=idempotency_key, step=0)
        row |= dict(request=request, state="queued", created_at=time.time())
        training, new = await core.ask(self.store.insert, row, key)
        if not new and training.request != request:
            message = f"Idempotency-Key {idempotency_key!r} was used for another request, run {training.id}"
            raise ApiError(409, message, "idempotency_conflict", "Idempotency-Key")
        if new:
            core.events.add(training.topic, "stage", text="queued")
            self._begin(training)
        return training, new

    def _check_rights(self, body: RunBody, key: Key) -> None:
        """Raise if a run does what its key may not: what runs outside the sandbox is for the operator.

        Raises:
            ApiError: 403.
            ConfigError: settings outside their range.
        """
        config, trusted = self._config(body), key.may("upload" if self.core.config.trust_uploads else "admin")
        if config.engine_flags and not key.may("admin"):
            message = "config.engine_flags: a program's command line takes a key with the right admin"
            raise ApiError(403, message, "forbidden", "config")
        if config.tracking.traces and not key.may("admin"):
            message = "config.tracking.traces: requests of the service's own to another host take a key with the right admin"
            raise ApiError(403, message, "forbidden", "config")
        if not key.may("admin") and (others := sorted(set(config.tracking.trackers) - OWN_TRACKERS)):
            message = f"config.tracking.trackers: {others[0]} runs inside the service, which takes a key with the right admin"
            raise ApiError(403, message, "forbidden", "config")
        own = [field for field, names in ALGORITHMS.items() if getattr(config.algorithm, field) not in names]
        what = (
            "agent: a command" if body.agent is not None else f"config.algorithm.{own[0]}: a function of yours" if own else ""
        )
        if what and not trusted:
            message = (
                f"{what} runs outside the sandbox, so it takes a key with the right admin, or the right to upload "
                "where the service was started with --trust-uploads"
            )
            raise ApiError(403, message, "forbidden", "agent" if body.agent is not None else "config")

    async def resume(self) -> None:
        """Go on with the runs that were under way when this server ended, and from now on with what other servers leave."""
        await self._take()
        self._keeping = asyncio.get_running_loop().create_task(keep(self._turn, "training runs"))

    async def _turn(self) -> None:
        """Hold on to what is carried out here, stop what was lost or cancelled at another server, and take what is free."""
        carried_out = [training for training, _ in self._active.values() if not training.over]
        states = await self.core.ask(self.store.renew, carried_out) if carried_out else {}
        for training in carried_out:
            active = self._active.get(training.id)
            if active is not None and not training.over and states.get(training.id) not in ACTIVE:
                self._cancelled.setdefault(training.id, None)
                self._stop(training, active[1], REVOKED_SECONDS)
        if not self.core.draining:
            await self._take()

    async def _take(self) -> None:
        """Carry out what is free and can go on here."""
        for training, own in await self.core.ask(self.store.free):
            if training.id in self._active or not (own or await self._can_go_on(training)):
                continue
            if not await self.core.ask(self.store.take, training):
                continue
            ended = await self.core.ask(self.core.keys.ended, [training.key]) if training.key != LOCAL.id else {}
            if training.key in ended:
                await self._end(training, "cancelled", ended[training.key])
            else:
                self._begin(training)

    async def _can_go_on(self, training: Training) -> bool:
        """Whether another server's run needs nothing that only that one has, such as its checkpoints."""
        return (training.step == 0 or self.made.here(training)) and await self.core.envs.knows(training.request["env"])

    async def get(self, id: str, key: Key) -> Training:
        """A run of this key, or any for an admin.

        Raises:
            ApiError: there is none.
        """
        training = self._active[id][0] if id in self._active else await self.core.ask(self.store.get, id)
        if training is None or (training.key != key.id and not key.may("admin")):
            raise unknown("run", id)
        return training

    async def list(self, key: Key, limit: int) -> Sequence[Training]:
        """The runs of a key, newest first; all for an admin."""
        owner = None if key.may("admin") else key.id
        return [
            self._active[t.id][0] if t.id in self._active else t for t in await self.core.ask(self.store.list, owner, limit)
        ]

    async def cancel(self, training: Training) -> Training:
        """End it after a checkpoint, which is not waited for if it takes long."""
        active = self._active.get(training.id)
        if active is None:
            if not training.over:  # another server carries it out, and sees it with its next sign of life
                training = await self.core.ask(self.store.cancel, training.id)
                self._tell_end(training)
            return training
        training, task = active
        self._cancelled.setdefault(training.id, None)
        self._stop(training, task, CHECKPOINT_SECONDS)
        await asyncio.wait({task}, timeout=CANCEL_SECONDS)
        return training

    def _stop(self, training: Training, task: asyncio.Task[None], seconds: float) -> None:
        process = self._processes.get(training.id)
        if process is not None:
            self.core.spawn(process.stop(seconds))
        else:
            task.cancel()

    async def restart(self, training: Training) -> Training:
        """Go on with a run that failed or was cancelled, from its last checkpoint.

        Raises:
            ApiError: it is not over, or complete, or another server has what it made; or this one is shutting down; or its key
                has too many runs, or works no more.
        """
        if self.core.draining:
            raise ApiError(503, "the service is shutting down; try again later", "draining", headers={"Retry-After": "5"})
        if training.step:
            self.made.require_here(training)
        if training.state not in ("failed", "cancelled"):
            raise ApiError(
                409, f"run {training.id} is {training.state}; only one that failed or was cancelled goes on", "state"
            )
        key = await self.core.ask(self.core.keys.by_id, training.key)
        if key is None:
            raise ApiError(409, f"the key of run {training.id} was revoked or has expired", "state")
        await self.core.ask(self.store.reopen, training, key)
        self._tell(training, "stage", text="queued")
        self._begin(training)
        return training

    def relayed(self, secret: str) -> str | None:
        """The environment that the holder of a secret may play."""
        return next((env for env, known in self._relays.values() if hmac.compare_digest(known.encode(), secret.encode())), None)

    def interrupt(self) -> None:
        """Let each run end after a checkpoint; they go on when the service is started again."""
        self._closing = True
        for process in self._processes.values():
            process.interrupt()

    async def close(self) -> None:
        """Stop the runs; they go on when the service is started again, or at another server if they can."""
        self.interrupt()
        if self._keeping is not None:
            self._keeping.cancel()
        await self.made.close()
        await asyncio.gather(*(process.stop(STOP_SECONDS) for process in self._processes.values()))
        tasks = [task for _, task in self._active.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=DATABASE_LIMIT)
        with contextlib.suppress(RelaxError):  # else they are free when there was no sign of life for long enough
            await self.core.ask(self.store.release)

    # ------------------------------------------------------------------------------------------------------- carrying out

    def _config(self, body: RunBody) -> RunConfig:
        """The settings of a run.

        Raises:
            ConfigError: outside their range, or a model that the service does not offer: a path from a request reaches no file.
        """
        config = run_config_from_dict(body.config | {"env": body.env})
        offered = sorted({*BUILDERS, self.core.config.model})
        if config.model not in offered:
            raise ConfigError(f"model = {config.model!r}; this service trains {', '.join(offered)}")
        for name, engines in (("engines", config.engines), ("autoscale.max_engines", config.autoscale.max_engines)):
            if engines > self.core.config.max_engines:
                raise ConfigError(f"{name} = {engines}; allowed here: at most {self.core.config.max_engines}")
        return config

    def _begin(self, training: Training) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(training))
        self._active[training.id] = training, task
        task.add_done_callback(lambda _: self._active.pop(training.id, None))
        if training.key != LOCAL.id:
            over = self.core.watch.use(training.key, lambda why: self._end_with_key(training, task, why))
            task.add_done_callback(lambda _: over())

    def _end_with_key(self, training: Training, task: asyncio.Task[None], why: str) -> None:
        self._cancelled[training.id] = why
        self._stop(training, task, REVOKED_SECONDS)

    async def _carry_out(self, training: Training) -> None:
        try:
            await self._to_its_end(training)
        except ClaimLost as error:
            self._cancelled.pop(training.id, None)
            logger.warning("a training run stops here: %s", error, extra={FIELDS: {"run": training.id}})

    async def _to_its_end(self, training: Training) -> None:
        try:
            await self._until_over(training)
        except asyncio.CancelledError:
            if training.id in self._cancelled and not self._closing:
                await self._end(training, "cancelled", self._cancelled[training.id])
                return
            raise
        except ClaimLost:
            raise
        except Exception as error:
            what = str(error) if isinstance(error, RelaxError) else f"{type(error).__name__}: {error}"
            await self._end(training, "failed", what)

    async def _until_over(self, training: Training) -> None:
        """Carry a run out, however often its process ends before its time."""
        killed = 0
        while True:
            await self._host(training)  # before it takes a place: others may be carried out meanwhile
            async with self._places:
                step = training.step
                process = RunProcess(await self._start(training, do="train"), self._log(training))
                self._processes[training.id] = process
                try:
                    await self._note(training, "running")
                    await process.start()
                    if training.id in self._cancelled:  # it was told to end when there was no process yet
                        await process.stop(REVOKED_SECONDS)
                    host_gone = asyncio.create_task(self._host_gone(training))
                    host_gone.add_done_callback(lambda task, p=process: None if task.cancelled() else p.interrupt())
                    try:
                        last = await self._follow(training, process)
                    finally:
                        host_gone.cancel()
                    code = await process.wait()
                finally:
                    del self._processes[training.id]
                    self._relays.pop(f"{training.id} train", None)
                    await process.stop(STOP_SECONDS)
                if training.id in self._cancelled:
                    return await self._end(training, "cancelled", self._cancelled[training.id])
                if last is not None and last.kind == "done":
                    return await self._end(training, "completed", None)
                if last is not None and last.kind == "failed" and code != INTERRUPTED and self._host_there(training):
                    return await self._end(training, "failed", last.text)
                if self._closing:
                    return
                killed = 0 if training.step > step or code == INTERRUPTED else killed + 1
                if killed > RESTARTS:
                    return await self._end(training, "failed", f"its process ended {killed} times: {await process.log_tail()}")
                if killed:
                    self._tell(training, "warning", text=f"the process of the run ended (exit code {code}); starting it again")
                    await asyncio.sleep(min(2.0**killed, RESTART_SECONDS))

    async def _follow(self, training: Training, process: RunProcess) -> Told | None:
        """Pass on what the process says; returns the last word, if there was one."""
        last = None
        async for told in process.told():
            if told.kind == "step":
                training.step = int(told.data["step"])
                self._tell(training, "step", **told.data)
            elif told.kind in ("stage", "warning"):
                self._tell(training, told.kind, text=told.text)
            else:
                last = told
        return last

    async def _start(self, training: Training, do: Any) -> Start:
        body = RunBody.model_validate(training.request)
        config = self._config(body).to_dict()
        folder = self.folder / training.id
        common: dict[str, Any] = dict(do=do, folder=str(folder), media=str(self.core.store.root), config=config)
        common |= dict(agent=body.agent, resume=(folder / "config.json").exists())
        kept = folder / DESCRIPTION  # for when its host is away
        with contextlib.suppress(ApiError):
            await self.core.envs.find(body.env)
        description = self.core.envs.description(body.env)
        if description is not None:
            folder.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(msgspec.msgpack.encode(description))
        elif kept.exists():
            description = msgspec.msgpack.decode(kept.read_bytes(), type=Description)
        else:
            return Start(env=body.env, **common)
        secret = f"rlr_{secrets.token_urlsafe(32)}"
        self._relays[f"{training.id} {do}"] = body.env, secret
        return Start(relayed=Relayed(description, self.core.envs.others.relay_url, secret), **common)

    def _host_there(self, training: Training) -> bool:
        with contextlib.suppress(ApiError):
            self.core.envs.spec(training.request["env"])
            link = self.core.envs.link(training.request["env"])
            return not (isinstance(link, SocketLink) and link.given_up)
        return False

    async def _host(self, training: Training) -> None:
        """Wait until the environment can be played."""
        with contextlib.suppress(ApiError):
            await self.core.envs.find(training.request["env"])
        while not self._host_there(training):
            changed = self.core.envs.changed
            if training.state != "waiting":
                await self._note(training, "waiting")
                self._tell(training, "stage", text=f"waiting for the host of {training.request['env']}")
            await changed.wait()

    async def _host_gone(self, training: Training) -> None:
        """Ends when the environment can be played no more."""
        while self._host_there(training):
            await self.core.envs.changed.wait()

    def _log(self, training: Training) -> Path:
        return self.folder / training.id / "logs" / "run.log"

    def _tell(self, training: Training, kind: str, **data: Any) -> None:
        self.core.events.add_held(self.store.holding.held(training.id), training.topic, kind, **data)

    async def _end(self, training: Training, state: str, error: str | None) -> None:
        training.error, training.ended_at = error, time.time()
        self._cancelled.pop(training.id, None)
        await self._note(training, state)
        self._tell_end(training)

    def _tell_end(self, training: Training) -> None:
        self.core.events.add(training.topic, "finished", **(training.ending or {}))

    async def _note(self, training: Training, state: str) -> None:
        training.state = state
        await self.core.ask(self.store.note, training)
