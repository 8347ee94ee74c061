"""Where a process stands among the workers of its service."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import orjson

from relax_server.api.workers.board import Board
from relax_server.api.workers.channel import ASK_SECONDS, Channel, Handler, Message, unavailable
from relax_server.gateway.errors import ApiError

HOME = 0
"""The worker that everything lives in that is no session: rollouts, training runs, hosts of environments."""
MARK = "."
"""Behind the worker's number, in the names of what lives in one worker; those of worker 0 have neither."""


class WorkerPlace:
    """A worker among those of its service, and its way to the others. Belongs to one event loop.

    A service with one worker has a place as well: there are no others to tell or to ask.

    Args:
        index: number of the worker, from 0.
        count: how many there are.
        channel: to the others; None: there are none.
        board: what all of them see.
    """

    def __init__(self, index: int = HOME, count: int = 1, channel: Channel | None = None, board: Board | None = None) -> None:
        self.index, self.count, self._channel, self.board = index, count, channel, board or Board()
        self._handlers: dict[str, Handler] = {}
        self._ended: list[Callable[[int], None]] = []
        if channel is not None:
            channel.on("ended", self._told_of_end)

    @property
    def alone(self) -> bool:
        """Whether it is the only one."""
        return self.count == 1

    @property
    def home(self) -> bool:
        """Whether rollouts, training runs and hosts live here."""
        return self.index == HOME

    @property
    def others(self) -> list[int]:
        """Numbers of the other workers, those that are just started again included."""
        return [worker for worker in range(self.count) if worker != self.index]

    def marked(self, rest: str) -> str:
        """The random part of a name, such that `worker_of` finds this worker in it."""
        return f"{self.index}{MARK}{rest}" if self.index else rest

    def on(self, kind: str, handler: Handler) -> None:
        """Let a function take messages of a kind, from other workers and from this one.

        What it returns, a dict of plain data, answers `ask`; a `RelaxError` that it raises is raised there as an `ApiError`.
        """
        self._handlers[kind] = handler
        if self._channel is not None:
            self._channel.on(kind, handler)

    def tell(self, worker: int, kind: str, /, **body: Any) -> None:
        """Tell another worker something; one that has just ended is told when it is back.

        Raises:
            ApiError: 503, it takes nothing any more.
        """
        if self._channel is None:
            raise unavailable(worker)
        self._channel.send(worker, kind, orjson.dumps(body))

    def send_file(self, worker: int, kind: str, data: bytes, file: int) -> None:
        """Send another worker a copy of an open file, with bytes that belong to it.

        Raises:
            ApiError: 503, it takes nothing any more.
        """
        if self._channel is None:
            raise unavailable(worker)
        self._channel.send(worker, kind, data, file)

    def tell_others(self, kind: str, /, **body: Any) -> None:
        """Tell all other workers something; one that takes nothing any more is left out."""
        for worker in self.others:
            try:
                self.tell(worker, kind, **body)
            except ApiError:
                continue

    async def ask(self, worker: int, kind: str, /, *, seconds: float = ASK_SECONDS, **body: Any) -> dict[str, Any]:
        """Ask a worker, also this one itself, and wait for what the handler there returns.

        Raises:
            ApiError: what the handler raised; or 503, it does not answer within `seconds`, or ended meanwhile.
        """
        if worker == self.index:
            told = self._handlers[kind](Message(kind, worker, orjson.dumps(body)))
            return (await told if inspect.isawaitable(told) else told) or {}
        if self._channel is None or not self.board.up(worker):
            raise unavailable(worker)
        return await self._channel.ask(worker, kind, body, seconds)

    async def ask_others(self, kind: str, /, *, seconds: float = ASK_SECONDS, **body: Any) -> dict[int, dict[str, Any]]:
        """Ask all other workers at once; the answers by number, without those that gave none."""
        asked = [self.ask(worker, kind, seconds=seconds, **body) for worker in self.others]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return {worker: answer for worker, answer in zip(self.others, answers, strict=True) if isinstance(answer, dict)}

    def when_ended(self, told: Callable[[int], None]) -> None:
        """Be told the number of a worker whose process has ended, before it is started again."""
        self._ended.append(told)

    def _told_of_end(self, message: Message) -> None:
        worker = message.body["worker"]
        assert self._channel is not None
        self._channel.ended(worker)
        for told in self._ended:
            told(worker)


def worker_of(random: str) -> int:
    """The worker that is named in the random part of an id or a secret; `HOME` where none is."""
    number, mark, _ = random.partition(MARK)
    return int(number) if mark and number.isascii() and number.isdigit() and len(number) <= 3 else HOME
