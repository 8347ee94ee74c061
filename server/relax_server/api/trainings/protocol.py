"""What the service and the process of a run say to each other: JSON, one message a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from relax_sdk.errors import ConfigError
from relax_sdk.hosting.protocol import Description
from relax_sdk.registry import EnvSpec, get_spec
from relax_server.api.environments.relay_link import RelayLink
from relax_server.rollout.hosted import hosted_spec


class Relayed(msgspec.Struct, frozen=True):
    """An environment that the service plays for the run."""

    description: Description
    url: str
    """Address of the relay."""
    secret: str


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first line that a run's process gets."""

    do: Literal["train", "serve"]
    """Train, or answer requests with the trained model."""
    folder: str
    media: str
    """The service's folder of media."""
    config: dict[str, Any]
    """A `RunConfig`."""
    env: str | None = None
    """Name of an installed environment."""
    relayed: Relayed | None = None
    agent: str | list[str] | None = None
    resume: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a trained model."""

    do: Literal["evaluate", "generate"]
    split: str = "eval"
    limit: int = 0
    messages: list[dict[str, Any]] = []
    sampling: dict[str, Any] = {}


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A line that a run's process writes."""

    kind: Literal["stage", "step", "warning", "ready", "answer", "done", "failed"]
    text: str = ""
    data: Any = None


def spec_of(start: Start) -> EnvSpec:
    """The environment of a run.

    Raises:
        RegistryError, EnvError: it cannot be found, or its description cannot be right.
        ConfigError: none was named.
    """
    if start.relayed is not None:
        description = start.relayed.description
        return hosted_spec(description, RelayLink(description.id, start.relayed.url, start.relayed.secret, Path(start.media)))
    if start.env is None:
        raise ConfigError("a run needs an environment")
    return get_spec(start.env)
