"""`SyncEnv`: an `Env` as plain Gymnasium code expects one: no coroutines, and tool calls answered by `step`."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable
from typing import Any

import gymnasium

from relax_sdk.env import ResetResult, StepResult
from relax_sdk.messages import AssistantMessage
from relax_sdk.tools import call_tools

CLOSE_SECONDS = 5.0
"""For what the loop keeps, such as connections, to be closed."""


class SyncEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """The wrapper that `gymnasium.make("relax/…")` puts around every environment.

    `async def` methods run to their end in an event loop of this wrapper's own (on its own thread, so that it also works in a
    notebook). An action with tool calls runs the tools, and their answers are the observation.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        """Begin an episode; as `Env.reset`, but never a coroutine."""
        return self._finish(self.env.reset(seed=seed, options=options))

    def step(self, action: AssistantMessage) -> StepResult:
        """Act; as `Env.step`, but never a coroutine, and tool calls are carried out here."""
        if not action.tool_calls:
            return self._finish(self.env.step(action))
        answers, reward, terminated, truncated = self._finish(call_tools(self.unwrapped, action))
        return answers, reward, terminated, truncated, {}

    def close(self) -> None:
        """Close the environment and end the event loop."""
        super().close()
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
            self._loop = self._thread = None

    def _finish(self, result: Any) -> Any:
        return (
            asyncio.run_coroutine_threadsafe(_await(result), self._own_loop()).result()
            if inspect.isawaitable(result)
            else result
        )

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(self._loop,), name="relax-sync-env", daemon=True)
            self._thread.start()
        return self._loop


async def _await(result: Awaitable[Any]) -> Any:
    return await result


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
