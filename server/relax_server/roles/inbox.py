"""The messages of a run's roles to its controller: heard in order, or kept until the one that is waited for is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from relax_sdk.errors import RunError
from relax_server.roles.main_roles import RoleDied
from relax_server.roles.messages import Died, Failed, RolloutReport, Warn

M = TypeVar("M")

START_SECONDS = 180.0
"""For a role to load its model and say that it is ready."""

LOOK_SECONDS = 1.0
"""Between two looks for roles that hang."""


class Inbox:
    """All messages of a run's roles, in the order in which they came. Belongs to one event loop.

    Args:
        logs: folder of the roles' logs, for errors.
        look: kills the roles that were not heard of for too long; called about once a second while nothing is there to be read.
        meanwhile: handles a `Warn` or a `RolloutReport` that comes while another message is waited for.
        failure: makes the error of a run that a role's end or failure ends.
    """

    def __init__(
        self,
        logs: Path,
        look: Callable[[float], None],
        meanwhile: Callable[[Any], Awaitable[None]],
        failure: Callable[[Died | Failed], Awaitable[RunError]],
    ) -> None:
        self._logs, self._look, self._meanwhile, self._failure = logs, look, meanwhile, failure
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._looked_at = 0.0
        self._played: Any = None
        """How much of a warm-up was played at the last report."""

    def put(self, message: Any) -> None:
        """A message has come."""
        self._messages.put_nowait(message)

    async def next(self) -> Any:
        """The next message, however long it takes; a role that dies or hangs meanwhile is told of by its `Died`."""
        while True:
            if (
                self._messages.empty() and time.monotonic() - self._looked_at > LOOK_SECONDS
            ):  # what is in it may be what we miss
                self._looked_at = time.monotonic()
                self._look(self._looked_at)
            try:
                message = await asyncio.wait_for(self._messages.get(), LOOK_SECONDS)
            except TimeoutError:
                continue
            self._goes_on(message)
            return message

    async def expect(self, kind: type[M], seconds: float = START_SECONDS, again: str = "") -> M:
        """Wait for one kind of message during the start; others are kept for later or handled as failures.

        Args:
            kind: of message.
            seconds: to wait; anew whenever an episode of the warm-up has ended.
            again: a role that is being started again. Its death is then told as such, and that of others is kept for later.

        Raises:
            RoleDied: the role that is being started again.
            RunError: a role died, failed or took too long.
        """
        kept: list[Any] = []
        try:
            async with asyncio.timeout(seconds) as limit:
                while True:
                    message = await self._messages.get()
                    if isinstance(message, kind):
                        return message
                    if again and isinstance(message, Died):
                        if message.role == again:
                            raise RoleDied(message)
                    elif isinstance(message, Died) or (isinstance(message, Failed) and (message.fatal or not again)):
                        raise await self._failure(message)
                    if isinstance(message, (Warn, RolloutReport)):
                        await self._meanwhile(message)
                        if self._goes_on(message):
                            limit.reschedule(asyncio.get_running_loop().time() + seconds)
                    else:
                        kept.append(message)
        except TimeoutError:
            raise RunError(f"no {kind.__name__} within {seconds:.0f} s; see the logs in {self._logs}") from None
        finally:
            for message in kept:
                self._messages.put_nowait(message)

    def rest(self) -> list[Any]:
        """Take out what has come and was not read."""
        return [self._messages.get_nowait() for _ in range(self._messages.qsize())]

    def _goes_on(self, message: Any) -> bool:
        """Whether a report tells of more episodes of the warm-up than the one before."""
        if not isinstance(message, RolloutReport):
            return False
        before, self._played = self._played, message.values.get("warmup")
        return self._played != before
