"""What all episodes of a rollout worker share, and what one episode is to play."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from relax_sdk.config import RolloutConfig, SamplingParams
from relax_sdk.env import Env
from relax_sdk.errors import RegistryError
from relax_sdk.registry import EnvSpec
from relax_sdk.session import Agent
from relax_sdk.tools import has_tools, tool_schemas
from relax_sdk.trajectory import derive_seed
from relax_server.rollout.media import MediaIntake
from relax_server.rollout.pool import EnginePool
from relax_server.rollout.rendering import Renderer
from relax_server.rollout.threads import CallThreads

if TYPE_CHECKING:
    from relax_server.rollout.session import EpisodeSession

AGENT_GROUP = "relax.agents"
"""Entry points: `chat` and `tools` are the built-in loops."""


@dataclass
class Tally:
    """Counts of what happened, for display."""

    states: Counter[str] = field(default_factory=Counter)
    """Episodes that are in a state now, or ended in it."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed attempts by the name of their error."""
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=16))
    """The last failures in words."""
    ignored_cancel: int = 0
    """Episodes that went on after they were cancelled, and were left behind."""
    unlike_groups: int = 0
    """Groups whose episodes were not all shown the same at first, though they had task and seed in common."""
    closing: int = 0
    """Environments whose `close` failed."""

    def fail(self, error: BaseException) -> None:
        """Count a failure."""
        self.failures[type(error).__name__] += 1
        self.errors.append(str(error))


@dataclass
class RolloutContext:
    """Shared by all episodes of one worker."""

    run: str
    spec: EnvSpec
    env_class: type[Env]
    config: RolloutConfig
    agent: Agent
    renderer: Renderer
    intake: MediaIntake
    pool: EnginePool
    threads: CallThreads
    slots: asyncio.Semaphore
    """One per episode that may be in flight."""
    gate: asyncio.Event
    """Set while model calls may be sent."""
    routed_experts: bool = False
    """Ask the engine for the experts it chose."""
    observes: bool = True
    """Whether an episode must begin with an observation; not so where the agent has a world of its own."""
    tokens: bool = True
    """Whether answers come with token ids; then a trajectory is of use only if it has some."""
    make_session: Callable[..., EpisodeSession] | None = None
    """In place of `EpisodeSession`, of its arguments."""
    tally: Tally = field(default_factory=Tally)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Episodes in flight, and environments being closed."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that nobody waits for, until the worker stops."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    @functools.cached_property
    def needs_close(self) -> bool:
        """Whether environments define `close`."""
        return self.env_class.close is not Env.close

    def tools(self, env: Env) -> tuple[Sequence[dict[str, Any]], str]:
        """Schemas of the environment's tools, and a name for them; made once, as they belong to the class."""
        if self._tools is None:
            schemas = tool_schemas(env)
            self._tools = schemas, json.dumps(schemas, sort_keys=True)
        return self._tools

    _tools: tuple[Sequence[dict[str, Any]], str] | None = field(default=None, init=False)


@dataclass(frozen=True)
class EpisodeTask:
    """One episode to play."""

    split: str
    task_index: int
    row: dict[str, Any]
    group_id: str
    group_index: int
    group_size: int
    seed: int
    """The environment's; all episodes of a group have the same."""
    sampling: SamplingParams
    attempt: int = 1

    @property
    def id(self) -> str:
        """Of the trajectory."""
        return f"{self.group_id}/{self.group_index}"

    def sampling_at(self, turn: int, room: int, own: SamplingParams | None = None) -> SamplingParams:
        """Sampling of a 0-based turn that has room for `room` tokens; with a sampling seed, every turn gets its own.

        Args:
            turn: its number.
            room: tokens that may follow the prompt.
            own: in place of the episode's sampling.
        """
        sampling = own if own is not None else self.sampling
        if room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        if sampling.sampling_seed is not None:
            seed = derive_seed(sampling.sampling_seed, self.split, self.task_index, self.group_index, turn) % 2**31
            sampling = replace(sampling, sampling_seed=seed)
        return sampling


def default_agent(env_class: type[Env]) -> Agent:
    """The built-in loop for an environment: the tool loop if it has tools, else the chat loop.

    Raises:
        RegistryError: the loops are not installed.
    """
    name = "tools" if has_tools(env_class) else "chat"
    for point in entry_points(group=AGENT_GROUP):
        if point.name == name:
            return point.load()
    raise RegistryError(f"no agent {name!r} in the entry-point group {AGENT_GROUP}; reinstall relax-gym")
