"""Sessions: episodes that are played from here."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from relax_sdk.client.trajectories import read_trajectory
from relax_sdk.client.transport import TIMEOUT, AsyncTransport, Call, Event, Transport, wire
from relax_sdk.errors import ConfigError
from relax_sdk.messages import AssistantMessage
from relax_sdk.trajectory import Trajectory


@dataclass(frozen=True)
class Step:
    """The environment's answer to an action."""

    observation: list[dict[str, Any]]
    """New OpenAI messages."""
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.truncated


@dataclass(frozen=True)
class Finished:
    """The end of a session, whose trajectory is durable."""

    trajectory_id: str
    status: str
    reward: float
    rewards: dict[str, float]
    error: str | None = None


class _OpenSession:
    """What is known of an open session."""

    def __init__(self, opened: Mapping[str, Any]) -> None:
        self.id: str = opened["id"]
        self.key: str = opened["key"]
        """The key of this session alone, which an agent is given."""
        self.base_url: str = opened["base_url"]
        """For any OpenAI client."""
        self.observation: list[dict[str, Any]] = opened["observation"]
        """The first one, OpenAI messages."""
        self.tools: list[dict[str, Any]] = opened["tools"]
        self.seed: int = opened["seed"]
        self.trajectory_id: str = opened["trajectory_id"]
        self.finished: Finished | None = None
        self._turns = 0

    def _recorded(self) -> Call:
        return Call("GET", f"/v1/trajectories/{self.trajectory_id}")


class RemoteSession(_OpenSession):
    """One episode that is played from here.

    Leaving the context finishes it, also when its limit on turns or tokens has ended it, or cancels it after any other error.
    """

    def __init__(self, transport: Transport, opened: Mapping[str, Any]) -> None:
        super().__init__(opened)
        self._transport = transport

    def chat(self, messages: Sequence[Any], **settings: Any) -> dict[str, Any]:
        """One model call; returns the assistant's message.

        Args:
            messages: OpenAI messages, or `Message` objects.
            **settings: fields of a chat request, such as `max_tokens`.
        """
        message = _read_message(self._transport.send(_chat_call(self.id, messages, settings)))
        self._turns += 1
        return message

    def step(self, action: AssistantMessage | Mapping[str, Any] | str) -> Step:
        """Act in the environment; tool calls go to its tools."""
        return Step(**self._transport.send(_step_call(self.id, action)))

    def reward(self, value: float, name: str = "reward") -> None:
        """Set a component of the reward from here."""
        self._transport.send(_reward_call(self.id, value, name))

    def finish(self) -> Finished:
        """End the episode; returns when its trajectory is scored and durable."""
        if self.finished is None:
            self.finished = Finished(**self._transport.send(Call("POST", f"/v1/sessions/{self.id}/finish")))
        return self.finished

    def cancel(self) -> None:
        """End it without a reward."""
        self._transport.send(Call("DELETE", f"/v1/sessions/{self.id}"))

    def events(self, after: int = 0) -> Generator[Event]:
        """Yield the session's events until it is over."""
        return self._transport.events(f"/v1/sessions/{self.id}/events", after)

    def trajectory(self) -> Trajectory:
        """The recorded trajectory, once the session is finished."""
        return read_trajectory(self._transport.send(self._recorded()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.finished is not None:
            return
        if _at_limit(error) or (error is None and self._turns):
            self.finish()
        else:
            self.cancel()


class AsyncRemoteSession(_OpenSession):
    """`RemoteSession` for asyncio."""

    def __init__(self, transport: AsyncTransport, opened: Mapping[str, Any]) -> None:
        super().__init__(opened)
        self._transport = transport

    async def chat(self, messages: Sequence[Any], **settings: Any) -> dict[str, Any]:
        """See `RemoteSession.chat`."""
        message = _read_message(await self._transport.send(_chat_call(self.id, messages, settings)))
        self._turns += 1
        return message

    async def step(self, action: AssistantMessage | Mapping[str, Any] | str) -> Step:
        """See `RemoteSession.step`."""
        return Step(**await self._transport.send(_step_call(self.id, action)))

    async def reward(self, value: float, name: str = "reward") -> None:
        """See `RemoteSession.reward`."""
        await self._transport.send(_reward_call(self.id, value, name))

    async def finish(self) -> Finished:
        """See `RemoteSession.finish`."""
        if self.finished is None:
            self.finished = Finished(**await self._transport.send(Call("POST", f"/v1/sessions/{self.id}/finish")))
        return self.finished

    async def cancel(self) -> None:
        """See `RemoteSession.cancel`."""
        await self._transport.send(Call("DELETE", f"/v1/sessions/{self.id}"))

    def events(self, after: int = 0) -> AsyncGenerator[Event]:
        """See `RemoteSession.events`."""
        return self._transport.events(f"/v1/sessions/{self.id}/events", after)

    async def trajectory(self) -> Trajectory:
        """See `RemoteSession.trajectory`."""
        return read_trajectory(await self._transport.send(self._recorded()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finished is not None:
            return
        if _at_limit(error) or (error is None and self._turns):
            await self.finish()
        else:
            await self.cancel()


def attach() -> RemoteSession:
    """The session that this process was started to play, from `RELAX_BASE_URL`, `RELAX_SESSION_ID` and `RELAX_SESSION_KEY`.

    A training run starts its agents with these; for a session of `relax serve` they are its URL, the session's id and its key.

    Raises:
        ConfigError: the process was not started as an agent.
    """
    names = ("RELAX_BASE_URL", "RELAX_SESSION_ID", "RELAX_SESSION_KEY")
    url, id, key = (os.environ.get(name, "") for name in names)
    if not (url and id and key):
        missing = [name for name in names if not os.environ.get(name)]
        raise ConfigError(f"{', '.join(missing)} not set: this process was not started as an agent of a training run")
    transport = Transport(url, key, TIMEOUT)
    state = transport.send(Call("GET", f"/v1/sessions/{id}"))
    return RemoteSession(transport, state | {"key": key, "base_url": f"{url}/v1/sessions/{id}/openai/v1"})


def open_call(env: str, settings: dict[str, Any]) -> Call:
    """The request that opens a session."""
    return Call("POST", "/v1/sessions", {"env": env} | settings, safe=False)


def _chat_call(session: str, messages: Sequence[Any], settings: dict[str, Any]) -> Call:
    body = {"messages": [wire(message) for message in messages], "model": "policy"} | settings
    return Call("POST", f"/v1/sessions/{session}/openai/v1/chat/completions", body, safe=False)


def _read_message(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body["choices"][0]["message"].items() if value is not None}


def _step_call(session: str, action: Any) -> Call:
    if isinstance(action, str):
        action = {"content": action}
    return Call("POST", f"/v1/sessions/{session}/step", {"action": wire(action)}, safe=False)


def _reward_call(session: str, value: float, name: str) -> Call:
    return Call("POST", f"/v1/sessions/{session}/reward", {"name": name, "value": value})


def _at_limit(error: BaseException | None) -> bool:
    """Whether an error says that the episode's limit on turns or tokens is reached; any OpenAI client's error has the code."""
    return getattr(error, "code", None) == "episode_over"
