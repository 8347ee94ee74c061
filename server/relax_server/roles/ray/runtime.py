"""The `ray` runtime: a run whose roles are actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from relax_sdk.client.upload import by_value
from relax_sdk.config import RunConfig
from relax_sdk.errors import ConfigError, RelaxError, RunError
from relax_sdk.findings import Finding
from relax_sdk.runtime import Job, Observer, Tell
from relax_server.roles.launch import note_failed_start
from relax_server.roles.local import LocalRuntime, await_end
from relax_server.roles.local_model import LocalModel
from relax_server.roles.messages import Died, Failed, RunEnded, Stage, StartController, StepShown, Stop, Warn
from relax_server.roles.ray.cluster import address_of, connected, look
from relax_server.roles.ray.placement import RayPlacement
from relax_server.roles.restarts import Restarts
from relax_server.roles.senses_at_end import check_senses_at_end

SILENCE_SECONDS = 60.0
"""A controller that says nothing for so long is started again."""


class RayRuntime:
    """Carries out runs on a Ray cluster; the program that calls `fit` follows them, and they end with it."""

    def fit(self, job: Job, observer: Observer) -> None:
        """Train to the last step, and check the senses on this machine where `eval.check_senses` asks for it.

        Ctrl-C, SIGTERM and SIGHUP end with a checkpoint where there is something to keep.

        Raises:
            ConfigError: environment, model and settings, or the cluster and the run, do not fit together.
            RunError: the run ended early; it can be resumed.
            Interrupted: a signal stopped it; a `KeyboardInterrupt`.
        """
        observer.stage("connecting to Ray" if address_of(job.config) else "starting Ray")
        job = dataclasses.replace(job, runtime="ray")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(connected(job.config))
                observer.stage("looking at the nodes of the Ray cluster")
                seen = look(job.config, job.folder)
                if seen.problems:
                    problems = "\n".join(map(str, seen.problems))
                    raise ConfigError(f"this Ray cluster cannot carry out the run:\n{problems}")
            except RelaxError as error:
                note_failed_start(job, observer, error)
                raise
            placement = RayPlacement(job.folder, job.config, seen.one_machine)
            follower = Follower(job, observer, placement)
            try:
                await_end(follower.run, follower.request_stop, observer)
            finally:
                placement.close()
        check_senses_at_end(job, observer, LocalRuntime().play_senses)

    def open_model(self, job: Job, tell: Tell) -> LocalModel:
        """Start an engine and a rollout process with the run's trained weights, on this machine."""
        return LocalModel(job, tell)

    def examine(self, folder: Path, config: RunConfig) -> list[Finding]:
        """Findings on whether the cluster can carry a run out.

        Args:
            folder: where runs will be kept.
            config: of the run; its `ray`, `engines` and `training` matter.

        Raises:
            ConfigError: the folder cannot be written.
            RunError: the cluster cannot be reached.
        """
        with connected(config):
            return look(config, folder).findings


class Follower:
    """What the user's program does while a run goes on: it starts the controller, again if it dies, and shows what it says."""

    def __init__(self, job: Job, observer: Observer, placement: RayPlacement) -> None:
        cls = job.spec.load()
        self._cls, self._job, self._observer, self._placement = cls, job, observer, placement
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._controller = placement.role("controller", job.folder, self._inbox.put_nowait)
        self._restarts = Restarts(job.how_to_resume)
        self._stopping = False

    async def run(self) -> None:
        """Follow the run to its end.

        Raises:
            RelaxError: what the controller ended with.
        """
        try:
            await self._start(self._job.resume)
            while True:
                message = await self._next()
                if isinstance(message, RunEnded):
                    if message.error is not None:
                        raise message.error
                    return
                await self._handle(message)
        finally:
            await self._controller.stop()

    async def _start(self, resume: bool, restarted: str = "") -> None:
        """The environment's code travels by value unless an installed package holds it: nodes may not have the user's files."""
        spec = dataclasses.replace(self._job.spec, entry=self._cls)
        with by_value(self._cls, self._job.agent):
            await self._controller.start(
                StartController(dataclasses.replace(self._job, spec=spec, resume=resume), self._placement, restarted)
            )
        if self._stopping:
            self._controller.send(Stop())

    async def _next(self) -> Any:
        while True:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._inbox.get(), SILENCE_SECONDS)
            if self._controller.alive():
                self._observer.warn(f"the controller said nothing for {SILENCE_SECONDS:.0f} s; restarting it")
                self._controller.kill()

    async def _handle(self, message: Any) -> None:
        if isinstance(message, Stage):
            self._observer.stage(message.text)
        elif isinstance(message, StepShown):
            self._observer.step(message.metrics)
        elif isinstance(message, Warn):
            self._observer.warn(message.text)
        elif isinstance(message, Failed):
            raise (ConfigError if message.fatal else RunError)(f"{message.text} (logs: {self._job.folder / 'logs'})")
        elif isinstance(message, Died) and self._stopping:
            raise RunError(f"the controller ended while it was stopping; go on with: {self._job.how_to_resume}")
        elif isinstance(message, Died):
            self._restarts.count(
                "controller", f"the last time {message.how}; end of {message.log}:\n{await self._controller.log_tail()}"
            )
            ended = f"the controller ended ({message.how}); starting it again from the last checkpoint"
            self._observer.warn(ended)
            await self._start(resume=True, restarted=ended)

    def request_stop(self, at_once: bool = False) -> None:
        """End with what can be kept; a second time at once."""
        self._stopping = True
        self._controller.send(Stop())
