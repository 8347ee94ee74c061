"""Threads for plain functions that may block the event loop; one that hangs is given up and replaced.

The standard thread pool was not enough: its threads cannot be given up, a hung one keeps the interpreter from exiting,
and it wakes the loop once per call, where these wake it once for all calls that have finished meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from relax_sdk.errors import EpisodeTimeout

START_THREADS = 2
"""Started at once when there is work; more only when calls have to wait, because idle threads contend for the GIL."""
GROW_AFTER = 0.005
"""Seconds that calls wait before the number of threads is doubled."""


class ThreadCall:
    """One call on its way through a thread."""

    __slots__ = (
        *("arguments", "begin", "context", "end", "error", "function", "future", "given_up"),
        *("limit", "orphaned", "started", "submitted", "timer", "value"),
    )

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        limit: float,
        future: asyncio.Future[Any],
        orphaned: Callable[[], Any] | None,
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.limit = limit
        self.future = future
        self.orphaned = orphaned
        self.context = contextvars.copy_context()
        """Context variables of whoever asked for the call."""
        self.timer: asyncio.TimerHandle | None = None
        self.submitted = time.monotonic()
        self.started: float | None = None
        self.value: Any = None
        self.error: BaseException | None = None
        self.given_up = False
        """The call was running when it was given up: its thread is still inside `function`, or was."""
        self.begin = [None]
        """Whoever takes it decides whether the call runs at all: the thread, or the loop that gives the call up."""
        self.end = [None]
        """Whoever takes it decides how a running call ends: the thread that has finished, or the loop that gives it up."""

    @property
    def queued(self) -> float:
        """Seconds it waited for a thread; time that counts against no limit."""
        return (self.started if self.started is not None else time.monotonic()) - self.submitted


def _take(token: list[None]) -> bool:
    """Take a token; of several threads that try, exactly one gets it (`list.pop` is atomic)."""
    try:
        token.pop()
    except IndexError:
        return False
    return True


class CallThreads:
    """Runs plain functions in daemon threads for one event loop.

    Args:
        name: of the threads.
        max_threads: that work at a time; given-up ones are not counted.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self.name = name
        self.max_threads = max_threads
        self.abandoned = 0
        """Calls given up so far because they passed their limit."""
        self.stuck = 0
        """Given-up calls whose thread has still not come back."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self._finished: deque[ThreadCall] = deque()
        self._waking = False
        self._threads = 0
        self._open = 0
        self._growing = False
        self._closed = False

    def submit(
        self, function: Callable[..., Any], *arguments: Any, limit: float, orphaned: Callable[[], Any] | None = None
    ) -> ThreadCall:
        """Hand a call to a thread; await `job.future` for its value.

        The future raises what the function raised, or `EpisodeTimeout` when it ran longer than `limit` seconds; waiting for
        a free thread does not count.

        Args:
            function: to call.
            arguments: given to it.
            limit: seconds.
            orphaned: called in the same thread afterwards if the call was given up meanwhile; its errors are ignored.
        """
        if self._closed:
            raise RuntimeError(f"the {self.name} threads are closed")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        job = ThreadCall(function, arguments, limit, self._loop.create_future(), orphaned)
        job.timer = self._loop.call_later(limit, self._check, job)
        self._open += 1
        if self._open > self._threads:
            self._grow_later()
        self._jobs.put(job)
        return job

    async def call(self, function: Callable[..., Any], *arguments: Any, limit: float) -> Any:
        """`submit` and wait."""
        return await self.submit(function, *arguments, limit=limit).future

    def give_up(self, job: ThreadCall) -> bool:
        """Wait no longer for a call; if it is running, another thread takes the place of its own.

        Returns:
            False when it has finished already.
        """
        if _take(job.begin):
            self._open -= 1
        elif _take(job.end):
            self._open -= 1
            self._threads -= 1
            self.stuck += 1
            job.given_up = True
            if not self._closed:
                self._start_thread()
        else:
            return False
        if job.timer is not None:
            job.timer.cancel()
        return True

    def close(self) -> None:
        """Let the threads end; calls that are running finish unobserved."""
        self._closed = True
        for _ in range(self._threads):
            self._jobs.put(None)

    # ------------------------------------------------------------------------------------------------- in the loop

    def _grow_later(self) -> None:
        while self._threads < min(START_THREADS, self._open, self.max_threads):
            self._start_thread()
        if self._threads < self.max_threads and not self._growing:
            self._growing = True
            assert self._loop is not None
            self._loop.call_later(GROW_AFTER, self._grow)

    def _grow(self) -> None:
        self._growing = False
        waiting = self._jobs.qsize()
        if self._closed or waiting == 0:
            return
        for _ in range(min(waiting, self._threads, self.max_threads - self._threads)):
            self._start_thread()
        self._grow_later()

    def _start_thread(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name=self.name, daemon=True).start()

    def _check(self, job: ThreadCall) -> None:
        """Give a call up if it has been running for its limit; look again later if it waited for its thread."""
        assert self._loop is not None
        now = time.monotonic()
        due = (job.started if job.started is not None else now) + job.limit
        if due > now:
            job.timer = self._loop.call_later(due - now, self._check, job)
            return
        if not self.give_up(job):
            return
        self.abandoned += 1
        if not job.future.done():
            job.future.set_exception(EpisodeTimeout(f"took longer than {job.limit:g} s; its thread was given up"))

    def _deliver(self) -> None:
        self._waking = False
        while self._finished:
            job = self._finished.popleft()
            self._open -= 1
            if job.timer is not None:
                job.timer.cancel()
            if job.future.done():
                continue
            if job.error is not None:
                job.future.set_exception(job.error)
            else:
                job.future.set_result(job.value)

    def _came_back(self) -> None:
        self.stuck -= 1

    # ------------------------------------------------------------------------------------------------ in a thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not _take(job.begin):
                continue
            job.started = time.monotonic()
            try:
                job.value = job.context.run(job.function, *job.arguments)
            except StopIteration as error:
                job.error = RuntimeError(f"raised StopIteration({error})")
            except BaseException as error:
                job.error = error
            if not _take(job.end):
                if job.orphaned is not None:
                    with contextlib.suppress(BaseException):
                        job.orphaned()
                self._tell(self._came_back)
                return
            self._finished.append(job)
            if not self._waking:
                self._waking = True
                self._tell(self._deliver)
            job = None

    def _tell(self, callback: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
