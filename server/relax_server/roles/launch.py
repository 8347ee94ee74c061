"""A run from its claim to its end: what carries it out is made, and can be asked to stop before it is."""

from __future__ import annotations

import asyncio
import contextlib

from relax_sdk.errors import ConfigError, RunError
from relax_sdk.examples import gives_examples
from relax_sdk.run import Run
from relax_sdk.runtime import Job, Observer
from relax_server.journal import open_journal
from relax_server.models.catalog import resolve_model
from relax_server.roles.claim import Claim
from relax_server.roles.controller import Controller
from relax_server.roles.devices import allot, visible_gpus
from relax_server.roles.full_disk import full_disk
from relax_server.roles.layout import RunLayout
from relax_server.roles.placement import LocalPlacement, Placement
from relax_server.roles.record import RunRecord, reason_of
from relax_server.roles.status import RunState, RunStatus, StatusFile
from relax_server.trackers import make_trackers


async def make_controller(job: Job, observer: Observer, placement: Placement | None = None, restarted: str = "") -> Controller:
    """Claim a run in its journal, and make what carries it out.

    Args:
        job: the run.
        observer: is told how it goes.
        placement: starts the roles; by default on this machine.
        restarted: how the controller before this one ended; empty: there was none.

    Raises:
        ConfigError: another program carries it out; or the model, a tracker or the GPUs that are named cannot be had.
        JournalError: the journal cannot be opened.
    """
    try:
        if placement is None:
            placement = LocalPlacement(allot(job.config, visible_gpus()))
        place = placement.journal or RunLayout(job.folder).journal
        journal = await asyncio.to_thread(open_journal, place, claim=job.holder.id)
    except Exception as error:
        note_failed_start(job, observer, error)
        raise
    claim = Claim(journal, job.folder.name, job.holder)
    record: RunRecord | None = None
    claimed = False
    try:
        await claim.take(observer.stage)
        claimed = True
        trackers = make_trackers(job.config.tracking)
        record = RunRecord(job, observer, await asyncio.to_thread(lambda: gives_examples(job.spec.load())), trackers)
        record.started(restarted)
        model = await asyncio.to_thread(
            resolve_model, job.config.model, job.config.seed, job.config.media
        )  # it may have to be built
        model = await asyncio.to_thread(placement.model, model, job.folder)
        return Controller(job, record, placement, journal, claim, model, placement.exchange(job.folder))
    except BaseException as error:
        if record is not None:
            await record.trackers.close("stopped" if isinstance(error, asyncio.CancelledError) else "failed")
        if claimed or not isinstance(error, ConfigError):  # the folder of another program's run is not ours to write to
            note_failed_start(job, observer, error, record)
        await claim.end()
        journal.close()
        raise


def note_failed_start(job: Job, observer: Observer, error: BaseException, record: RunRecord | None = None) -> None:
    """Note in the folder why a run ended before anything carried it out; a folder that cannot be written stays as it is.

    Args:
        job: the run.
        observer: of the run.
        error: that it ended with.
        record: open; it is closed. None: there is none yet.
    """
    stopped = isinstance(error, asyncio.CancelledError)
    rows = Run(job.folder, job.config).metrics
    step = int(rows[-1]["step"]) if rows else 0
    with contextlib.suppress(OSError):
        if record is None:
            record = RunRecord(job, observer)
        record.step_done = step
        record.ended(error, stopped)
    state: RunState = "stopped" if stopped else "failed"
    reason = "stopped while it was starting" if stopped else reason_of(error)
    status = RunStatus(state, "", step, job.config.steps, (), None, {}, reason)
    StatusFile(RunLayout(job.folder).status, lambda: status).write(status)


class Launch:
    """One run in the event loop that calls `run`; a stop may be requested at any moment.

    Args:
        job, observer, placement, restarted: as for `make_controller`.
    """

    def __init__(self, job: Job, observer: Observer, placement: Placement | None = None, restarted: str = "") -> None:
        self._job, self._observer, self._placement, self._restarted = job, observer, placement, restarted
        self._making: asyncio.Task[Controller] | None = None
        self._controller: Controller | None = None
        self._requests: list[bool] = []

    async def run(self) -> None:
        """Train to the last step.

        Raises:
            ConfigError: environment, model and settings do not fit together, or another program carries the run out.
            RunError: the run ended early; it can be resumed.
        """
        self._making = asyncio.create_task(make_controller(self._job, self._observer, self._placement, self._restarted))
        if self._requests:
            self._making.cancel()
        try:
            self._controller = await self._making
        except asyncio.CancelledError:
            if not self._requests:
                raise
            raise RunError(f"stopped while it was starting; go on with: {self._job.how_to_resume}") from None
        for at_once in self._requests:
            self._controller.request_stop(at_once)
        try:
            await self._controller.run()
        except OSError as error:
            full = full_disk(error, (self._job.folder, self._controller.weights_root))
            if full is None:
                raise
            raise RunError(f"{full}: {self._job.how_to_resume}") from error

    def request_stop(self, at_once: bool = False) -> None:
        """End with what can be kept; a second time at once."""
        self._requests.append(at_once)
        if self._controller is not None:
            self._controller.request_stop(at_once)
        elif self._making is not None:
            self._making.cancel()
