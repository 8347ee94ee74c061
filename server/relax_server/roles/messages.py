"""What roles say to each other: frozen dataclasses, pickled on their way from process to process."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_sdk.config import RunConfig, SamplingParams
from relax_sdk.errors import RelaxError
from relax_sdk.evaluation import Evaluation, Played
from relax_sdk.messages import AssistantMessage, Message
from relax_server.engines.addresses import EngineAddress

# ------------------------------------------------------------------------------------------------- controller → rollout


@dataclass(frozen=True)
class StartRollout:
    """The first message to a rollout process."""

    spec: Any
    """The `EnvSpec`, pickled by value where its class lives in a script or notebook."""
    agent: Any
    config: RunConfig
    run: str
    folder: Path
    model_path: Path
    engines: tuple[EngineAddress, ...]
    train: bool
    """False: evaluate and chat only."""
    features: Path | None = None
    """Folder in shared memory where media features are exchanged."""
    journal: str | None = None
    """Where groups are kept; None: in the run folder."""
    claim: str | None = None
    """`Holder.id` of the program that has claimed the run in the journal."""


@dataclass(frozen=True)
class Begin:
    """Start playing train groups."""

    version: int
    consumed: int
    dropped: int


@dataclass(frozen=True)
class Published:
    """Engines have new weights."""

    version: int
    consumed: int
    """Groups inside published steps, from the start of the run."""
    dropped: int
    """Groups that will never be trained on, from the start of the run."""


@dataclass(frozen=True)
class Loading:
    """Engines begin to load weights; until `Published`, an engine may have these or those from before."""

    version: int


@dataclass(frozen=True)
class SetEngines:
    """The engines to use from now on; each that leaves is answered by an `EngineLeft`."""

    engines: tuple[EngineAddress, ...]
    drain: float = 0.0
    """Seconds for calls in flight at engines that leave; those that are left begin again elsewhere."""


@dataclass(frozen=True)
class Evaluate:
    """Play a split greedily."""

    step: int
    split: str
    limit: int


@dataclass(frozen=True)
class Chat:
    """One generation by hand."""

    id: int
    messages: tuple[Message, ...]
    sampling: SamplingParams


@dataclass(frozen=True)
class MakeWarmup:
    """Play episodes with random well-formed actions and commit them as split `warmup`."""

    groups: int


@dataclass(frozen=True)
class Stop:
    """End; a policy saves a checkpoint first."""


# ------------------------------------------------------------------------------------------------- rollout → controller


@dataclass(frozen=True)
class RolloutReady:
    """The environment is loaded and the journal open."""

    has_eval: bool
    has_warmup: bool


@dataclass(frozen=True)
class RolloutReport:
    """The rollout's figures, sent at every step and once a second; its absence means that the process hangs."""

    values: dict[str, Any]
    """A `relax_server.rollout.RolloutStats` as a dictionary."""
    by_clock: bool = True
    """One of those that are sent once a second; the others all see the rollout at the end of a step."""


@dataclass(frozen=True)
class Evaluating:
    """How far an evaluation is."""

    step: int
    played: Played


@dataclass(frozen=True)
class Evaluated:
    """The answer to `Evaluate`."""

    step: int
    result: Evaluation
    version_min: int
    version_max: int


@dataclass(frozen=True)
class ChatDone:
    """The answer to `Chat`."""

    id: int
    message: AssistantMessage | None
    error: str | None


@dataclass(frozen=True)
class EngineLeft:
    """No call is in flight at this engine any more, and none will be."""

    url: str


@dataclass(frozen=True)
class WarmupMade:
    """The answer to `MakeWarmup`."""

    groups: int


@dataclass(frozen=True)
class Warn:
    """Something worth a line on the user's screen."""

    text: str
    role: str = ""
    """That says it, or that it is about."""


@dataclass(frozen=True)
class Failed:
    """The role cannot go on."""

    text: str
    fatal: bool
    """True: starting it again would fail the same way."""
    role: str = ""
    """Which one."""


# -------------------------------------------------------------------------------------------------- controller ↔ policy


@dataclass(frozen=True)
class StartPolicy:
    """The first message to a policy process."""

    config: RunConfig
    run: str
    folder: Path
    model_path: Path
    weights: Path
    """Folder in shared memory that gets one sub-folder per version."""
    checkpoint: Path | None
    """Go on from here."""
    features: Path | None = None
    """Folder in shared memory where media features are exchanged."""
    journal: str | None = None
    """Where groups are kept; None: in the run folder."""
    claim: str | None = None
    """`Holder.id` of the program that has claimed the run in the journal."""
    rank: int = 0
    """Number of this process among the ranks of the policy; 0 leads them."""
    meeting: Path | None = None
    """File by which the ranks find each other; None: there is one."""
    one_machine: bool = True
    """All ranks are on this machine, so that they need not be reached from elsewhere."""


@dataclass(frozen=True)
class Train:
    """Train to the last step."""


@dataclass(frozen=True)
class Warmup:
    """Train on split `warmup`, then report `PolicyReady` again."""


@dataclass(frozen=True)
class Continue:
    """The devices are free: go on with the batch that was taken."""


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that a process has started for itself and what belongs to it."""

    address: str
    environment: dict[str, str]
    """Variables that a process needs to join it, its token among them."""


@dataclass(frozen=True)
class PolicyReady:
    """The model is loaded and its weights are out."""

    step: int
    weights: Path
    cluster: Cluster | None = None
    """The queue's cluster, if the trainer has started one."""
    figures: tuple[dict[str, Any], ...] = ()
    """Figures of the last steps inside the checkpoint that it began from, oldest first, each with its `step`.

    The trainer told of these steps in `StepDone`, but who was told may have ended before it wrote them.
    """


@dataclass(frozen=True)
class Beat:
    """A role is well; sent about once a second while it waits for groups, fields or devices, and when it goes on."""

    waiting: bool


@dataclass(frozen=True)
class StartFields:
    """The first message to a role that computes a field: `advantages` or `reference`."""

    config: RunConfig
    run: str
    folder: Path
    model_path: Path
    cluster: Cluster | None
    """The cluster that the queue is in; None: the one that this process is in."""
    features: Path | None = None
    """Folder in shared memory where media features are exchanged."""


@dataclass(frozen=True)
class BatchTaken:
    """A batch is leased and its step begins."""

    step: int


@dataclass(frozen=True)
class StepDone:
    """A step is done and its weights are out."""

    step: int
    """Training steps so far; `RunConfig.version_at` has the version of the weights."""
    weights: Path
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """A checkpoint is complete and its groups are acked."""

    step: int
    path: Path
    last: bool
    """Nothing follows: the last step, or a `Stop`."""


# ------------------------------------------------------------------------------------------------- program ↔ controller


@dataclass(frozen=True)
class StartController:
    """The first message to a controller that does not live in the user's program."""

    job: Any
    """The `Job`."""
    placement: Any
    """The `Placement` that starts the other roles."""
    restarted: str = ""
    """How the controller before this one ended; empty: there was none."""


@dataclass(frozen=True)
class Stage:
    """What is being done when it is not a step."""

    text: str


@dataclass(frozen=True)
class StepShown:
    """The figures of one step."""

    metrics: dict[str, Any]


@dataclass(frozen=True)
class RunEnded:
    """The last message of a controller."""

    error: RelaxError | None
    """None: the run is done."""


# ------------------------------------------------------------------------------------------------------ actor → its owner


@dataclass(frozen=True)
class Started:
    """An actor runs."""

    pid: int
    host: str


@dataclass(frozen=True)
class Ended:
    """The role in an actor has ended."""

    returncode: int


# --------------------------------------------------------------------------------------------------- inside the parent


@dataclass(frozen=True)
class Died:
    """A role's process ended without being asked to."""

    role: str
    generation: int
    returncode: int | None
    log: Path
    cause: str = ""
    """Why, where it is known better than by a return code."""

    @property
    def how(self) -> str:
        """The end of the process, in words."""
        if self.cause:
            return self.cause
        if self.returncode is None or self.returncode >= 0:
            return f"exit code {self.returncode}"
        name = signal.Signals(-self.returncode).name
        return f"killed by {name}" + (", as the kernel does when memory runs out" if name == "SIGKILL" else "")
