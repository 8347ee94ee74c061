"""A run from its claim to its end: what carries it out is made, and can be asked to stop before it is."""

from __future__ import annotations

import asyncio

from relax_sdk.errors import RunError
from relax_sdk.examples import gives_examples
from relax_sdk.runtime import Job, Observer
from relax_server.journal import open_journal
from relax_server.models.catalog import resolve_model
from relax_server.roles.claim import Claim
from relax_server.roles.controller import Controller
from relax_server.roles.full_disk import full_disk
from relax_server.roles.layout import RunLayout
from relax_server.roles.placement import LocalPlacement, Placement
from relax_server.roles.record import RunRecord
from relax_server.trackers import make_trackers


async def make_controller(job: Job, observer: Observer, placement: Placement | None = None, restarted: str = "") -> Controller:
    """Claim a run in its journal, and make what carries it out.

    Args:
        job: the run.
        observer: is told how it goes.
        placement: starts the roles; by default on this machine.
        restarted: how the controller before this one ended; empty: there was none.

    Raises:
        ConfigError: another program carries it out; or the model, or a tracker, cannot be had.
        JournalError: the journal cannot be opened.
    """
    placement = placement if placement is not None else LocalPlacement()
    journal = await asyncio.to_thread(open_journal, placement.journal or RunLayout(job.folder).journal, claim=job.holder.id)
    claim = Claim(journal, job.folder.name, job.holder)
    record: RunRecord | None = None
    try:
        await claim.take(observer.stage)
        trackers = make_trackers(job.config.tracking)
        record = RunRecord(job, observer, await asyncio.to_thread(lambda: gives_examples(job.spec.load())), trackers)
        record.started(restarted)
        model = await asyncio.to_thread(resolve_model, job.config.model, job.config.seed)  # it may have to be built
        model = await asyncio.to_thread(placement.model, model, job.folder)
        return Controller(job, record, placement, journal, claim, model, placement.exchange(job.folder))
    except BaseException as error:
        if record is not None:
            stopped = isinstance(error, asyncio.CancelledError)
            await record.trackers.close("stopped" if stopped else "failed")
            record.ended(error, stopped)
        await claim.end()
        journal.close()
        raise


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
