"""What all episodes of a rollout worker share: the environment, the policies, and the places they may take."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from relax_sdk.env import Env
from relax_sdk.errors import RegistryError
from relax_sdk.session import Agent
from relax_sdk.tools import has_tools
from relax_server.rollout.environment import EnvContext
from relax_server.rollout.policy.base import Policies
from relax_server.rollout.stats import Tally
from relax_server.rollout.traces import Traces

AGENT_GROUP = "relax.agents"
"""Entry points: `chat` and `tools` are the built-in loops."""


@dataclass(kw_only=True)
class RolloutContext(EnvContext):
    """Shared by all episodes of one worker."""

    run: str
    agent: Agent
    policies: Policies
    slots: asyncio.Semaphore
    """One per episode that may be in flight."""
    scored: bool = True
    """Whether finished episodes are scored; where not, no reward function, judge or group reward is called."""
    traces: Traces = field(default_factory=Traces)
    """Spans of episodes go there."""
    tally: Tally = field(default_factory=Tally)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while some episodes of many are begun or cancelled, so that the event loop does other things in between."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Episodes in flight, and environments being closed."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for, until the worker stops."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


async def end_tasks(tasks: Collection[asyncio.Task[Any]], limit: float) -> None:
    """Cancel tasks and wait until they are over; the error of a task that is cancelled here is of no use to anybody.

    Args:
        tasks: may be over already.
        limit: seconds to wait at most; a task that does not heed its cancelling is then left alone.
    """
    waiting = [task for task in tasks if not task.done()]
    for task in waiting:
        task.cancel()
    if waiting:
        over, _ = await asyncio.wait(waiting, timeout=limit)
        for task in over:
            if not task.cancelled():
                task.exception()  # else asyncio prints it


def default_agent(env_class: type[Env]) -> Agent:
    """The built-in loop for an environment: the tool loop if it has tools, else the chat loop.

    Raises:
        RegistryError: the loops are not installed.
    """
    return _built_in("tools" if has_tools(env_class) else "chat")


@cache
def _built_in(name: str) -> Agent:
    """An agent by its entry point; looked up once, as all installed packages are read for it (20 ms)."""
    for point in entry_points(group=AGENT_GROUP):
        if point.name == name:
            return point.load()
    raise RegistryError(f"no agent {name!r} in the entry-point group {AGENT_GROUP}; reinstall relax-gym")
