"""What a service and the host of an environment say to each other: MessagePack, one message a frame.

The service asks, the host answers; each answer names the request by its number. Media travel beside the messages that name
them, each item once a connection.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from relax_sdk.errors import EnvError
from relax_sdk.trajectory import Trajectory


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """An environment, without its code."""

    id: str
    version: str = "0"
    doc: str = ""
    modalities: list[str] = []
    system_prompt: str | None = None
    tools: list[dict[str, Any]] = []
    """OpenAI schemas."""
    splits: dict[str, int | None] = msgspec.field(default_factory=lambda: {"train": None})
    """Rows of each split of its tasks; None: no end."""
    defaults: dict[str, Any] = {}
    """Settings of `Trainer` that suit it."""
    has_example: bool = False
    """Whether it can give examples of an action's form."""
    group_rewards: bool = False
    """Whether its rubric scores whole groups."""


# ------------------------------------------------------------------------------------------------- the service asks


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Begin an episode; answered by `Shown`."""

    id: int
    episode: str
    split: str
    task_index: int
    seed: int | None


class Act(msgspec.Struct, frozen=True, tag="act"):
    """Act in an episode; answered by `Outcome`."""

    id: int
    episode: str
    action: dict[str, Any]
    """An OpenAI message."""
    tools: bool
    """Carry out its tool calls; otherwise it is a step."""


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Score a finished trajectory; answered by `Scored`."""

    id: int
    episode: str
    trajectory: Trajectory


class ScoreGroup(msgspec.Struct, frozen=True, tag="score_group"):
    """Score the trajectories of a group; answered by a list of `Scored`."""

    id: int
    episode: str
    """One of them, which is still open."""
    trajectories: list[Trajectory]


class Example(msgspec.Struct, frozen=True, tag="example"):
    """An action in the right form; answered by an OpenAI message, or None."""

    id: int
    episode: str
    seed: int


class Close(msgspec.Struct, frozen=True, tag="close"):
    """An episode is over; not answered."""

    episode: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The host is registered; it shows the token when it has to connect again, and goes on with its episodes."""

    env: str
    token: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The host is not registered."""

    message: str


# --------------------------------------------------------------------------------------------------- the host answers


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a host."""

    env: Description
    token: str | None = None
    """The token of an earlier welcome."""


class Failure(msgspec.Struct, frozen=True):
    """An error in the environment."""

    kind: str
    """Name of a class of `relax_sdk.errors`."""
    message: str


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to a request."""

    id: int
    result: Any = None
    error: Failure | None = None
    media: list[tuple[str, bytes]] = []
    """Kind and bytes of the media that the result names and that were not sent before."""


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The host cannot go on: its environment cannot be loaded."""

    message: str


class Shown(msgspec.Struct, frozen=True):
    """The result of `Reset`."""

    messages: list[dict[str, Any]]
    info: dict[str, Any]


class Outcome(msgspec.Struct, frozen=True):
    """The result of `Act`."""

    messages: list[dict[str, Any]]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = {}


class Scored(msgspec.Struct, frozen=True):
    """The result of `Score`, and one of those of `ScoreGroup`."""

    reward: float
    rewards: dict[str, float]
    """Rewards by component."""


Ask: TypeAlias = Reset | Act | Score | ScoreGroup | Example
FromService: TypeAlias = Ask | Close | Welcome | Refused
FromHost: TypeAlias = Hello | Reply | Broken

_encoder = msgspec.msgpack.Encoder()
_from_service = msgspec.msgpack.Decoder(FromService)
_from_host = msgspec.msgpack.Decoder(FromHost)


def encode(message: FromService | FromHost) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def read_from_service(data: bytes) -> FromService:
    """A frame as a host gets it.

    Raises:
        EnvError: not one of ours.
    """
    return _read(_from_service, data)


def read_from_host(data: bytes) -> FromHost:
    """A frame as a service gets it.

    Raises:
        EnvError: not one of ours.
    """
    return _read(_from_host, data)


def _read(decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.DecodeError as error:
        raise EnvError(f"a message between service and environment cannot be read ({error})") from error
