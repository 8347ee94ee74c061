"""The runtime interface: what carries out `fit()`. Runtimes are found through the entry-point group `relax.runtimes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Literal, Protocol

from relax_sdk.config import RunConfig, SamplingParams
from relax_sdk.errors import RegistryError
from relax_sdk.evaluation import Evaluation
from relax_sdk.findings import Finding
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.registry import EnvSpec
from relax_sdk.run_lock import Holder

GROUP = "relax.runtimes"
EXTRAS = {"ray": "server,ray"}
"""What to install for a runtime; for all others `server`."""
Provide = Literal["host", "upload", "installed"]
"""How an environment gets to a service; see `Trainer`."""
Tell = Callable[[str], None]
"""Is told how far something is, in words; from any thread."""


@dataclass(frozen=True)
class Job:
    """One training run to carry out."""

    spec: EnvSpec
    config: RunConfig
    folder: Path
    """The run folder, absolute whatever is given; it exists and can be written."""
    agent: Callable[..., Any] | str | Sequence[str] | None = None
    """Plays the episodes instead of the built-in loops."""
    resume: bool = False
    """Go on from the folder's last checkpoint."""
    runtime: str = "local"
    """The name of the runtime, for advice on how to go on."""
    holder: Holder = field(default_factory=Holder.here)
    """The program that carries it out; others are refused the run in its name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.folder.resolve())

    @property
    def how_to_resume(self) -> str:
        """The command that goes on with this run."""
        return f"relax train --resume {self.folder}" + ("" if self.runtime == "local" else f" --runtime {self.runtime}")


class Observer(Protocol):
    """Is told how a run goes; called from one thread."""

    def stage(self, text: str) -> None:
        """What is being done when it is not a step: starting, warming up, saving."""
        ...

    def step(self, metrics: dict[str, Any]) -> None:
        """One optimizer step is done; the same dictionary goes to `metrics.jsonl`."""
        ...

    def warn(self, text: str) -> None:
        """Something was dropped, retried or restarted."""
        ...


class ServedModel(Protocol):
    """A finished run's model behind an engine, to evaluate and to try by hand."""

    def evaluate(self, split: str, limit: int, tell: Tell) -> Evaluation:
        """Play a split greedily; `limit` tasks at most."""
        ...

    def generate(self, messages: list[Message], sampling: SamplingParams) -> AssistantMessage:
        """Answer a conversation."""
        ...

    def close(self) -> None:
        """Stop the engine."""
        ...


class Runtime(Protocol):
    """Carries out runs."""

    def fit(self, job: Job, observer: Observer) -> None:
        """Train to the last step, or raise `RunError` with the folder left resumable. Blocks."""
        ...

    def open_model(self, job: Job, tell: Tell) -> ServedModel:
        """Start an engine with the run's weights."""
        ...

    def examine(self, folder: Path, config: RunConfig) -> list[Finding]:
        """What such a run, kept in `folder`, would find: what is there, and what is missing."""
        ...


def silent(text: str) -> None:
    """Nobody is told."""


def find_runtime(name: str | Runtime) -> Runtime:
    """A runtime by name; one that is given stays as it is.

    Raises:
        RegistryError: none of that name is installed.
    """
    if not isinstance(name, str):
        return name
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        raise RegistryError(f"unknown runtime {name!r}; installed: {', '.join(sorted(points)) or 'none'}")
    try:
        return points[name].load()()
    except ImportError as error:
        raise RegistryError(
            f"runtime {name!r} needs packages that are missing ({error}): pip install 'relax-gym[{EXTRAS.get(name, 'server')}]'"
        ) from error
