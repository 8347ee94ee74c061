"""The model thread: takes sequences and commands from other threads, steps the scheduler, hands results back."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from relax_server.engines.embedded.control import Control
from relax_server.engines.embedded.core import Finish, Sequence
from relax_server.timeline import Bursts

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ModelLoop(threading.Thread):
    """Runs steps while there is work; between steps it runs commands, so that these see no half-done step.

    A step that raises ends the sequences in it with status 500 and the loop goes on.
    """

    def __init__(self, control: Control, threads: int, deliver: Callable[[list[Sequence]], None]) -> None:
        super().__init__(name="model", daemon=True)
        self.control = control
        self._threads = threads
        self._deliver = deliver
        self._bursts = Bursts(control.timeline, "generate")
        self._inbox: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences; may be called by any thread."""
        self._inbox.put(lambda: self._add(sequences))

    def call(self, command: Callable[[], T]) -> Future[T]:
        """Run a command between steps; may be called by any thread."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(command())
                except BaseException as error:
                    future.set_exception(error)

        self._inbox.put(run)
        return future

    def stop(self) -> None:
        """End the thread after the step it is in."""
        self._inbox.put(None)

    def run(self) -> None:
        torch.set_num_threads(self._threads)
        scheduler = self.control.scheduler
        while self._commands(block=self.control.paused or not scheduler.has_work):
            if not self.control.paused and scheduler.has_work:
                self._step()
            if scheduler.events:
                events, scheduler.events = scheduler.events, []
                self._deliver(events)
        self._bursts.flush()

    def _commands(self, block: bool) -> bool:
        """Run what is in the inbox, waiting for something if `block`; False when asked to stop."""
        try:
            while True:
                command = self._inbox.get() if block else self._inbox.get_nowait()
                if command is None:
                    return False
                command()
                block = False
        except queue.Empty:
            return True

    def _add(self, sequences: list[Sequence]) -> None:
        refusal = self.control.refusal
        for sequence in sequences:
            if refusal:
                sequence.finish = Finish("abort", message=refusal, status=503)
                self.control.scheduler.events.append(sequence)
            else:
                self.control.scheduler.add(sequence)

    def _step(self) -> None:
        scheduler = self.control.scheduler
        began, tokens, prompt = time.time(), scheduler.stats.new_tokens, scheduler.stats.prompt_tokens
        try:
            with torch.inference_mode():
                scheduler.step()
        except Exception as error:
            logger.exception("a step with %d sequences failed", len(scheduler.running))
            scheduler.fail(f"the engine's forward pass failed: {type(error).__name__}: {error}")
        stats = scheduler.stats
        self._bursts.add(began, time.time(), tokens=stats.new_tokens - tokens, prompt_tokens=stats.prompt_tokens - prompt)
