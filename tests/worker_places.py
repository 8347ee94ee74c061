"""Workers of one service in one event loop, which end and are started again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from relax_server.api.workers.board import Board
from relax_server.api.workers.channel import SUPERVISOR, Channel, inboxes
from relax_server.api.workers.place import WorkerPlace


class Workers:
    """Their inboxes, their board, and what starts them would say."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._ends = inboxes(range(SUPERVISOR, count))
        self._outboxes = {number: written for number, (_, written) in self._ends.items()}
        self._file = Board.make()
        self._channels: dict[int, Channel] = {}
        self._supervisor = Channel(SUPERVISOR, self._ends[SUPERVISOR][0], self._outboxes)

    def place(self, number: int) -> tuple[WorkerPlace, Channel]:
        """A new process of a worker; it takes messages from `begin` on."""
        channel = self._channels[number] = Channel(number, self._ends[number][0], self._outboxes)
        return WorkerPlace(number, self.count, channel, Board(self._file)), channel

    def begin(self, number: int) -> None:
        """It takes messages, and is up."""
        self._channels[number].listen()
        Board(self._file).set_up(number, True)

    def kill(self, number: int) -> None:
        """It ends, and the others are told; what it was sent stays in its inbox."""
        self._channels.pop(number).close()
        Board(self._file).set_up(number, False)
        for other in self._channels:
            self._supervisor.send(other, "ended", b'{"worker": %d}' % number)

    def close(self) -> None:
        """Let go of all."""
        for channel in self._channels.values():
            channel.close()
        for pair in self._ends.values():
            for end in pair:
                end.close()
        os.close(self._file)


@contextlib.contextmanager
def workers_in_one_loop(count: int) -> Iterator[Workers]:
    """So many workers, none of which has begun."""
    workers = Workers(count)
    try:
        yield workers
    finally:
        workers.close()
