"""The processes of one role that work together: they start together, and the end of one is the end of all."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from relax_server.roles.messages import Beat, Died, Saved, StartPolicy
from relax_server.roles.placement import Placement, Role
from relax_server.roles.process import STOP_SECONDS, rank_name


class RankGroup:
    """All ranks of the policy: the interface of one `Role`. Whoever starts it hears rank 0, and of the first rank that ends.

    Args:
        placement: starts the processes.
        role: name of the role.
        folder: of the run.
        on_message: gets the messages of rank 0, and `Died` once when any of them ended by itself; the others are killed then.
        threads: of numeric libraries, in each process.
        ranks: how many processes.
    """

    def __init__(
        self, placement: Placement, role: str, folder: Path, on_message: Callable[[Any], None], threads: int, ranks: int
    ) -> None:
        self.role, self.generation = role, 0
        self._on_message = on_message
        self._members: list[Role] = [
            placement.role(rank_name(role, rank), folder, partial(self._hear, rank), threads) for rank in range(ranks)
        ]
        self._heard = [0.0] * ranks
        self._before = [0] * ranks
        """Generations of the processes that this start has replaced, or will: what they still say is of the start before."""
        self._over = True
        """The end of a process is no news: all are told to end, or one has ended."""
        self._first_to_end: int | None = None
        """The rank that ended first, since the last start."""

    @property
    def pid(self) -> int | None:
        """Process id of rank 0."""
        return self._members[0].pid

    @property
    def host(self) -> str:
        """Machine of rank 0."""
        return self._members[0].host

    @property
    def since(self) -> float | None:
        """Unix seconds of the last start."""
        return self._members[0].since

    @property
    def ranks(self) -> dict[str, Role]:
        """The processes by their names."""
        return {rank_name(self.role, rank): member for rank, member in enumerate(self._members)}

    async def start(self, first: StartPolicy) -> None:
        """Start all of them, each with its number; what is left of an earlier start is killed."""
        self.kill()
        self.generation += 1
        self._before = [member.generation for member in self._members]
        self._over, self._first_to_end = False, None
        now = time.monotonic()
        for rank, member in enumerate(self._members):
            self._heard[rank] = now
            meeting = first.weights / f"ranks-{self.generation}" if len(self._members) > 1 else None
            await member.start(dataclasses.replace(first, rank=rank, meeting=meeting))

    def _hear(self, rank: int, message: Any) -> None:
        if self._members[rank].generation <= self._before[rank]:
            return
        self._heard[rank] = time.monotonic()
        if isinstance(message, Died):
            self._ended(rank, message)
        elif rank == 0:
            self._over = self._over or (isinstance(message, Saved) and message.last)
            self._on_message(message)
        elif not isinstance(message, Beat) and not self._over:
            self._on_message(message)

    def _ended(self, rank: int, message: Died) -> None:
        if self._first_to_end is not None or (self._over and rank):
            return
        over, self._over, self._first_to_end = self._over, True, rank
        if not over:
            self.kill()
        self._on_message(dataclasses.replace(message, role=self.role, generation=self.generation))

    def send(self, message: Any) -> None:
        """Send to rank 0; one that is gone is reported by `Died`, not here."""
        self._members[0].send(message)

    def alive(self) -> bool:
        """Whether any of them runs."""
        return any(member.alive() for member in self._members)

    def quiet_since(self) -> float:
        """When the rank that was silent for longest was heard of last, by the monotonic clock; rank 0 is not looked at."""
        return min(self._heard[1:], default=time.monotonic())

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ask rank 0 to stop, which lets the others end, and kill what has not ended in time."""
        self._over = True
        for rank, member in enumerate(self._members):
            await member.stop(seconds if rank == 0 else 0.0)

    def kill(self) -> None:
        """SIGKILL to all, for ranks that hang."""
        for member in self._members:
            if member.alive():
                member.kill()

    async def log_tail(self) -> str:
        """The end of the log of the rank that ended first."""
        return await self._members[self._first_to_end or 0].log_tail()
