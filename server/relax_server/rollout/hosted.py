"""Environments whose code runs elsewhere: the service asks their host for every reset, step and score."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
import numpy as np

from relax_sdk import errors
from relax_sdk.env import Env, ResetResult, StepResult
from relax_sdk.errors import ConfigError, EnvError, EpisodeError, MediaError, RelaxError, RewardError
from relax_sdk.hosting.protocol import (
    Act,
    Ask,
    Close,
    Description,
    Example,
    FromService,
    Outcome,
    Reply,
    Reset,
    Score,
    Scored,
    ScoreGroup,
    Shown,
)
from relax_sdk.media import PARTS, Kind, MediaKey, MediaRef, MediaStore
from relax_sdk.media_places import media_names
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.registry import EnvSpec
from relax_sdk.rewards import finite
from relax_sdk.tasks import EndlessRows
from relax_sdk.trajectory import Trajectory

KNOWN_ITEMS = 100_000
"""References of media that are remembered."""
DESCRIPTION_LIMIT = 1 << 20
"""Bytes of a description: everybody who lists environments is shown all of them."""
MEDIA_SECONDS = 120.0
"""Seconds in which one item is to be stored or found."""

T = TypeVar("T")
TakeMedia = Callable[[Kind, bytes], Awaitable[MediaRef]]
InThread = Callable[..., Awaitable[Any]]
"""`await in_thread(function, *arguments, limit=seconds)`."""


class HostLink(ABC):
    """The way to one host. Belongs to one event loop.

    Args:
        env: name of the environment.
        store: media go here.
        in_thread: calls what waits for the disk.
        take: checks and stores an item; None: it is decoded here, as whoever hosts the environment is trusted with that.
    """

    def __init__(self, env: str, store: MediaStore, in_thread: InThread, take: TakeMedia | None = None) -> None:
        self.env, self.store, self._in_thread = env, store, in_thread
        self._take = take or self._put
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[Ask, asyncio.Future[Any]]] = {}
        self._unanswered: set[int] = set()
        """Numbers of requests whose answer has not come, also where nobody waits for it any more."""
        self._refs: OrderedDict[MediaKey, MediaRef] = OrderedDict()
        self._storing: set[asyncio.Task[None]] = set()
        """Answers whose media, or those of answers before them, are not stored yet."""
        self._closing: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def send(self, message: FromService) -> None:
        """Send a message to the host; where it is away for a moment, it gets it when it is back.

        Raises:
            EnvError: there is no host, and none is expected.
        """

    async def ask(self, make: Callable[[int], Ask]) -> Any:
        """Ask, and wait for the answer; whoever asks sets the time limit.

        Args:
            make: the request, given its number.

        Raises:
            EpisodeError, MediaError: as the host tells, or the host is gone.
        """
        request = make(next(self._ids))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[request.id] = request, future
        self._unanswered.add(request.id)
        try:
            await self.send(request)
            return await future
        finally:
            self._pending.pop(request.id, None)

    def close_episode(self, episode: str) -> None:
        """Tell the host that an episode is over."""
        task = asyncio.get_running_loop().create_task(self._close_episode(episode))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def arrived(self, reply: Reply) -> None:
        """Deliver an answer once the media that it names are stored; one that came before may have brought them.

        What nobody has asked for is dropped with its media: it would fill the disk.
        """
        if reply.id not in self._unanswered:
            return
        self._unanswered.discard(reply.id)
        if reply.media or self._storing:
            task = asyncio.get_running_loop().create_task(self._store(reply, set(self._storing)))
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)
        else:
            self._deliver(reply)

    def lost(self, why: str, asked: Collection[int] | None = None) -> None:
        """The host is gone: whatever waits for it fails.

        Args:
            why: for the error.
            asked: numbers of the requests that it was sent, where there may be another host already; None: all.
        """
        gone = {id: future for id, (_, future) in self._pending.items() if asked is None or id in asked}
        self._unanswered -= set(self._unanswered if asked is None else asked)
        for future in gone.values():
            if not future.done():
                future.set_exception(EnvError(why))

    async def messages(self, raw: list[dict[str, Any]]) -> list[Message]:
        """Messages of an answer.

        Raises:
            EnvError, MediaError: not messages, or they name media that never came.
        """
        refs = {key: ref for key in media_names(raw) if (ref := await self._ref(key)) is not None}
        return [Message.from_openai(message, refs, inline=False) for message in raw]

    @property
    def waiting(self) -> int:
        """Requests that are not answered yet."""
        return len(self._pending)

    async def _close_episode(self, episode: str) -> None:
        try:
            await self.send(Close(episode))
        except RelaxError:
            return  # the host is gone, and its episodes with it

    async def _store(self, reply: Reply, before: set[asyncio.Task[None]]) -> None:
        try:
            for kind, data in reply.media:
                if kind not in PARTS:
                    raise MediaError(f"the host sent a {kind!r}; there are {', '.join(PARTS)}")
                self._remember(await self._take(PARTS[kind].kind, data))
        except RelaxError as error:
            self._fail(reply.id, error)
            return
        if before:
            await asyncio.wait(before)
        self._deliver(reply)

    async def _on_disk(self, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return await self._in_thread(function, *arguments, limit=MEDIA_SECONDS)
        except OSError as error:  # a TimeoutError is one
            why = f"not done within {MEDIA_SECONDS:.0f} s" if isinstance(error, TimeoutError) else str(error)
            raise MediaError(f"the media of environment {self.env!r} in {self.store.root}: {why}") from error

    async def _put(self, kind: Kind, data: bytes) -> MediaRef:
        return await self._on_disk(lambda: self.store.put(PARTS[kind].from_bytes(data)))

    def _remember(self, ref: MediaRef) -> None:
        self._refs[ref.key] = ref
        if len(self._refs) > KNOWN_ITEMS:
            self._refs.popitem(last=False)

    async def _ref(self, key: MediaKey) -> MediaRef | None:
        ref = self._refs.get(key)
        if ref is None:
            kind, sha256 = key
            ref = await self._on_disk(self.store.find, sha256, kind)
            if ref is not None:
                self._remember(ref)
        return ref

    def _deliver(self, reply: Reply) -> None:
        if reply.error is not None:
            self._fail(reply.id, as_error(reply.error.kind, reply.error.message))
            return
        _, future = self._pending.get(reply.id, (None, None))
        if future is not None and not future.done():
            future.set_result(reply.result)

    def _fail(self, id: int, error: RelaxError) -> None:
        _, future = self._pending.get(id, (None, None))
        if future is not None and not future.done():
            future.set_exception(error)


def as_error(kind: str, message: str) -> RelaxError:
    """The error that a host told of; one that is not of an episode is the environment's."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, (EpisodeError, MediaError, ConfigError)):
        return found(message)
    return EnvError(f"{kind}: {message}")


class HostedEnv(Env):
    """One episode of an environment whose code runs elsewhere; `hosted_spec` makes the subclasses that are played."""

    blocking = False
    link: ClassVar[HostLink]
    description: ClassVar[Description]
    remote_tools: ClassVar[list[dict[str, Any]]]
    remote_group_rewards: ClassVar[bool]

    def __init__(self) -> None:
        self._episode = secrets.token_hex(8)

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        row = (options or {})["task"]
        asked = functools.partial(Reset, episode=self._episode, split=row["split"], task_index=row["index"], seed=seed)
        shown = _convert(await self.link.ask(asked), Shown)
        return await self.link.messages(shown.messages), shown.info

    async def step(self, action: AssistantMessage) -> StepResult:
        outcome = await self._act(action, tools=False)
        messages = await self.link.messages(outcome.messages)
        return messages, outcome.reward, outcome.terminated, outcome.truncated, outcome.info

    async def call_tools_remotely(self, action: AssistantMessage) -> tuple[list[Message], float, bool, bool]:
        """Carry out the tool calls at the host; the values are those of `relax_sdk.tools.call_tools`."""
        outcome = await self._act(action, tools=True)
        return await self.link.messages(outcome.messages), outcome.reward, outcome.terminated, outcome.truncated

    async def score_remotely(self, trajectory: Trajectory) -> tuple[float, dict[str, float]]:
        """Total and components of a finished trajectory."""
        asked = functools.partial(Score, episode=self._episode, trajectory=_slim(trajectory))
        return _checked(_convert(await self.link.ask(asked), Scored))

    async def score_group_remotely(self, trajectories: Sequence[Trajectory]) -> list[tuple[float, dict[str, float]]]:
        """Total and components of every trajectory of a group, the group's rewards added."""
        asked = functools.partial(ScoreGroup, episode=self._episode, trajectories=[_slim(t) for t in trajectories])
        scored = _convert(await self.link.ask(asked), list[Scored])
        if len(scored) != len(trajectories):
            raise RewardError(f"the host scored {len(scored)} of {len(trajectories)} trajectories of a group")
        return [_checked(item) for item in scored]

    def format_example(self, rng: np.random.Generator) -> Any:
        """A coroutine that gives the action."""
        return self._example(int(rng.integers(2**62)))

    async def close(self) -> None:
        self.link.close_episode(self._episode)

    async def _act(self, action: AssistantMessage, tools: bool) -> Outcome:
        raw = action.to_openai(lambda part: part.data_uri())
        return _convert(await self.link.ask(functools.partial(Act, episode=self._episode, action=raw, tools=tools)), Outcome)

    async def _example(self, seed: int) -> AssistantMessage:
        raw = await self.link.ask(functools.partial(Example, episode=self._episode, seed=seed))
        action = Message.from_openai(_convert(raw, dict[str, Any]), inline=False)
        if not isinstance(action, AssistantMessage):
            raise EnvError(f"format_example must give an assistant's message, got one of role {action.role}")
        return action


class IndexRows(Sequence[dict[str, Any]]):
    """Stands for the rows of a split that only the host has."""

    def __init__(self, split: str, n: int) -> None:
        self._split, self._n = split, n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: Any) -> Any:
        return _row(self._split, index)


def hosted_spec(description: Description, link: HostLink) -> EnvSpec:
    """An environment that is played like any other, by asking `link`.

    Raises:
        EnvError: the description cannot be right.
    """
    size = len(msgspec.msgpack.encode(description))
    if size > DESCRIPTION_LIMIT:
        raise EnvError(f"its docstring, tools and defaults have {size} bytes together; allowed: {DESCRIPTION_LIMIT}")
    if "train" not in description.splits or any(n is not None and n < 1 for n in description.splits.values()):
        raise EnvError(f"splits = {description.splits}; allowed: a train split and others, each of at least one row")
    unknown = set(description.modalities) - set(PARTS)
    if unknown:
        raise EnvError(f"modalities = {sorted(unknown)}; there are {', '.join(PARTS)}")
    for tool in description.tools:
        function = tool.get("function")
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise EnvError(f"tools: {tool!r:.100} is not the schema of a tool")
    fields = {
        "__doc__": description.doc,
        "link": link,
        "description": description,
        "modalities": set(description.modalities),
        "system_prompt": description.system_prompt,
        "version": description.version,
        "remote_tools": description.tools,
        "remote_group_rewards": description.group_rewards,
    }
    if not description.has_example:
        fields["format_example"] = Env.format_example
    entry = type("HostedEnv", (HostedEnv,), fields)
    tasks: dict[str, Any] = {
        name: EndlessRows(functools.partial(_row, name)) if n is None else IndexRows(name, n)
        for name, n in description.splits.items()
    }
    return EnvSpec(description.id, entry, tasks, defaults=dict(description.defaults))


def _row(split: str, index: int) -> dict[str, Any]:
    return {"split": split, "index": index}


def _slim(trajectory: Trajectory) -> Trajectory:
    """The trajectory without its routed experts, which are of no use to a reward."""
    return dataclasses.replace(trajectory, turns=[dataclasses.replace(turn, routed_experts=None) for turn in trajectory.turns])


def _checked(scored: Scored) -> tuple[float, dict[str, float]]:
    """Raises `RewardError` for a value that is not finite."""
    return finite("total", scored.reward), {name: finite(name, value) for name, value in scored.rewards.items()}


def _convert(raw: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise EnvError(f"the host's answer has the wrong form ({error})") from error
