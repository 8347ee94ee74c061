"""`EnvHost`: carries out in this process what a service asks of an environment."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from relax_sdk import errors
from relax_sdk.env import Env
from relax_sdk.errors import EnvError, RelaxError
from relax_sdk.examples import ask_example, gives_examples
from relax_sdk.hosting.protocol import (
    Act,
    Ask,
    Close,
    Description,
    Example,
    Failure,
    FromService,
    Outcome,
    Reply,
    Reset,
    Score,
    Scored,
    ScoreGroup,
    Shown,
    encode,
)
from relax_sdk.media import Media, MediaKey
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.registry import EnvSpec
from relax_sdk.rewards import score, score_group, scores_groups
from relax_sdk.tasks import KeptRows
from relax_sdk.tools import call_tools, tool_schemas
from relax_sdk.validation import check_reset, check_step, plain_data

SENT_ITEMS = 50_000
"""Media items that are remembered as sent."""

Send = Callable[[bytes], Awaitable[None]]


def describe(spec: EnvSpec) -> Description:
    """An environment without its code; makes one instance to ask it.

    Raises:
        RegistryError, ConfigError: it cannot be loaded, or its tasks or tools are wrong.
    """
    cls = spec.load()
    env = spec.make()
    splits = {name: len(split) if split.finite else None for name, split in spec.splits().items()}
    return Description(
        id=spec.id,
        version=cls.version,
        doc=inspect.getdoc(cls) or "",
        modalities=sorted(cls.modalities),
        system_prompt=cls.system_prompt,
        tools=tool_schemas(env),
        splits=splits,
        defaults=dict(spec.defaults),
        has_example=gives_examples(cls),
        group_rewards=scores_groups(env),
    )


class EnvHost:
    """The episodes of one environment, played in this process for a service elsewhere. Belongs to one event loop.

    Plain methods run in threads, as long as the environment does not say that it never blocks.

    Args:
        spec: the environment.
    """

    def __init__(self, spec: EnvSpec) -> None:
        self.spec = spec
        self._class = spec.load()
        self._rows = {name: KeptRows(split) for name, split in spec.splits().items()}
        self._episodes: dict[str, Env] = {}
        self._working: dict[int, asyncio.Task[None]] = {}
        self._last: dict[str, tuple[int, Any, Failure | None, list[Media]]] = {}
        """The last answer of every open episode: asked again after a broken connection, it is not worked out again."""
        self._sent: OrderedDict[MediaKey, None] = OrderedDict()
        self._send: Send | None = None

    @property
    def open(self) -> int:
        """Episodes that are not over."""
        return len(self._episodes)

    def connect(self, send: Send) -> None:
        """Answer by `send` from now on; nothing was sent there before.

        Args:
            send: takes a frame; raises `ConnectionError` when nobody is there, in which case the answer is kept, and
                `OverflowError` for a frame that is longer than the connection takes.
        """
        self._send = send
        self._sent.clear()

    def take(self, message: FromService) -> None:
        """Begin to carry out what is asked."""
        loop = asyncio.get_running_loop()
        if isinstance(message, Close):
            self._last.pop(message.episode, None)
            env = self._episodes.pop(message.episode, None)
            if env is not None and type(env).close is not Env.close:
                task = loop.create_task(self._close(env))
                self._working[id(task)] = task
                task.add_done_callback(lambda t: self._working.pop(id(t), None))
        elif isinstance(message, Ask) and message.id not in self._working:
            known = self._last.get(message.episode)
            again = known if known is not None and known[0] == message.id else None
            task = loop.create_task(self._answer(message) if again is None else self._tell(*again))
            self._working[message.id] = task
            task.add_done_callback(lambda _: self._working.pop(message.id, None))

    async def close(self) -> None:
        """End all episodes."""
        for task in list(self._working.values()):
            task.cancel()
        for env in self._episodes.values():
            if type(env).close is not Env.close:
                await self._close(env)
        self._episodes.clear()
        self._last.clear()

    # -------------------------------------------------------------------------------------------------------- asking

    async def _answer(self, ask: Ask) -> None:
        media: list[Media] = []
        try:
            result, failure = await self._carry_out(ask, media), None
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            result, failure, media = None, told(error), []
        if ask.episode in self._episodes:
            self._last[ask.episode] = ask.id, result, failure, media
        await self._tell(ask.id, result, failure, media)

    async def _tell(self, id: int, result: Any, failure: Failure | None, media: Sequence[Media]) -> None:
        new = {item.ref.key: item for item in media if item.ref.key not in self._sent}
        try:
            parts = [(item.kind, item.bytes()) for item in new.values()]
            frame = encode(Reply(id, result, failure, parts))
        except (RelaxError, TypeError, OverflowError) as error:
            frame, new = encode(Reply(id, error=told(error))), {}
        if self._send is None:
            return
        try:
            await self._send(frame)
        except ConnectionError:
            return  # asked again when there is a connection
        except OverflowError as error:  # an error's own answer is short
            await self._tell(id, None, told(error), ())
            return
        self._sent.update(dict.fromkeys(new))
        while len(self._sent) > SENT_ITEMS:
            self._sent.popitem(last=False)

    async def _carry_out(self, ask: Ask, media: list[Media]) -> Any:
        match ask:
            case Reset():
                return await self._reset(ask, media)
            case Act():
                return await self._act(ask, media)
            case Score():
                await score(self._env(ask), ask.trajectory, self._call)
                return Scored(ask.trajectory.reward, ask.trajectory.rewards)
            case ScoreGroup():
                await score_group(self._env(ask), ask.trajectories, self._call)
                return [Scored(t.reward, t.rewards) for t in ask.trajectories]
            case Example():
                return (await ask_example(self._env(ask), np.random.default_rng(ask.seed), self._call)).to_openai()

    async def _reset(self, ask: Reset, media: list[Media]) -> Shown:
        rows = self._rows.get(ask.split)
        if rows is None:
            raise EnvError(f"there is no split {ask.split!r}; there are {', '.join(self._rows)}")
        options = {"task": dict(await in_thread(rows.row, ask.task_index))}

        def make() -> Any:
            env = self._episodes[ask.episode] = self._class(**self.spec.kwargs)
            return None if inspect.iscoroutinefunction(env.reset) else env.reset(seed=ask.seed, options=options)

        result = await self._call(make)
        env = self._env(ask)
        if inspect.iscoroutinefunction(env.reset):
            result = await env.reset(seed=ask.seed, options=options)
        messages, info = check_reset(result)
        return Shown(_outgoing(messages, media), plain_data(info))

    async def _act(self, ask: Act, media: list[Media]) -> Outcome:
        env = self._env(ask)
        action = Message.from_openai(ask.action)
        assert isinstance(action, AssistantMessage)
        if ask.tools:
            messages, reward, terminated, truncated = await call_tools(env, action, self._call)
            return Outcome(_outgoing(messages, media), float(reward), bool(terminated), bool(truncated))
        outcome = check_step(await self._call(env.step, action))
        shown, info = _outgoing(outcome.observation, media), plain_data(outcome.info)
        return Outcome(shown, outcome.reward, outcome.terminated, outcome.truncated, info)

    def _env(self, ask: Ask) -> Env:
        env = self._episodes.get(ask.episode)
        if env is None:
            raise EnvError("the host of the environment does not know this episode; it was started again since")
        return env

    async def _close(self, env: Env) -> None:
        try:
            await self._call(env.close)
        except Exception:
            return  # the episode is over, and nobody is there to be told

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A plain or async function of the environment, where it may block."""
        if self._class.blocking and not inspect.iscoroutinefunction(function):
            value = await in_thread(function, *arguments)
        else:
            value = function(*arguments)
        return await value if inspect.isawaitable(value) else value


def told(error: BaseException) -> Failure:
    """An error as the service is told of it."""
    kind = type(error)
    ours = isinstance(error, RelaxError) and getattr(errors, kind.__name__, None) is kind
    return Failure(kind.__name__, str(error)) if ours else Failure("EnvError", errors.raised(error))


def _outgoing(messages: Sequence[Message], media: list[Media]) -> list[dict[str, Any]]:
    """Messages as OpenAI dictionaries, their media added to `media`."""
    for message in messages:
        media += message.media
    return [message.to_openai() for message in messages]


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread of its own, which keeps no process alive if it hangs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(value: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def work() -> None:
        value, failure = None, None
        try:
            value = function(*arguments)
        except StopIteration as error:
            failure = RuntimeError(f"raised StopIteration({error})")
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(deliver, value, failure)
        except RuntimeError:
            return  # the loop has ended

    threading.Thread(target=work, name="environment", daemon=True).start()
    return await future
