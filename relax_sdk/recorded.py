"""What a run has recorded, for looking at: trajectories found by what they are, and groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from relax_sdk.config import RunConfig
from relax_sdk.errors import ConfigError
from relax_sdk.runtime import find_runtime
from relax_sdk.showing import table_html, trajectory_html, trajectory_text, unscored
from relax_sdk.trajectory import Group, Status, Trajectory

if TYPE_CHECKING:
    import pandas

Sort = Literal["newest", "oldest", "best", "worst", "longest", "shortest", "stalest"]
SORTS: tuple[Sort, ...] = ("newest", "oldest", "best", "worst", "longest", "shortest", "stalest")


@dataclass(repr=False)
class RecordedTrajectory(Trajectory):
    """A trajectory with what the run's journal says of it. In a notebook it shows itself as a chat with players."""

    split: str = "train"
    """`train`, `eval`, `warmup` or `failed`."""
    seq: int | None = None
    """Its number in the order of commits."""
    step: int | None = None
    """The optimizer step that trained on it; None: it was not trained on."""
    advantage: float | None = None
    """Mean over its trained tokens; None: it was not trained on."""
    gap: float | None = None
    """Mean absolute difference between engine's and trainer's logprobs, in nats; None: not known."""
    staleness: int | None = None
    """Optimizer steps between its oldest weights and those that it was trained with; None: it was not trained on."""
    media_folder: str | None = None
    """Where the bytes of its media are; None: nowhere."""

    def __str__(self) -> str:
        return trajectory_text(self, self.media_folder)

    def _repr_html_(self) -> str:
        return trajectory_html(self, self.media_folder)


class Trajectories(list[RecordedTrajectory]):
    """Trajectories of a run. In a notebook they show themselves as a table; `frame` has it as a pandas frame."""

    @property
    def frame(self) -> pandas.DataFrame:
        """A row for each, without messages and tokens; reward components as columns `rewards/<name>`.

        An episode that failed, or is an example of the warm-up, has no reward: NaN.
        """
        import pandas

        columns = ("seq", "id", "group_id", "split", "task_index", "status", "reward", "step", "advantage", "gap", "staleness")
        rows = [
            {name: getattr(t, name) for name in columns}
            | ({"reward": None} if unscored(t) is not None else {})
            | {"turns": len(t.turns), "tokens": t.n_response_tokens, "error": t.error}
            | {f"rewards/{name}": value for name, value in t.rewards.items()}
            for t in self
        ]
        return pandas.DataFrame(rows)

    def _repr_html_(self) -> str:
        return table_html(self)


@dataclass(frozen=True)
class TrajectoryFilter:
    """Which recorded trajectories are wanted, and in which order.

    Raises:
        ConfigError: an order or a status that does not exist, or a limit below 1.
    """

    split: str | None = None
    """`train`, `eval`, `warmup` or `failed` (failed attempts, also those that were tried again or dropped); None: all."""
    status: str | Sequence[str] | None = None
    """One or several of `Status`; None: all."""
    reward: tuple[float | None, float | None] | float | None = None
    """A reward, or the least and the most, each None for no bound."""
    task: int | None = None
    """Index of a task."""
    step: int | None = None
    """The optimizer step that trained on them."""
    text: str | None = None
    """Words that occur in the episode's texts, in any case."""
    sort: Sort = "newest"
    limit: int | None = 20
    """None: all."""
    statuses: tuple[str, ...] = field(init=False, repr=False)
    """`status` as a tuple."""

    def __post_init__(self) -> None:
        given = (self.status,) if isinstance(self.status, str) else tuple(self.status or ())
        object.__setattr__(self, "statuses", tuple(str(status) for status in given))
        known = [str(status) for status in Status]
        for ok, name, allowed in (
            (self.sort in SORTS, "sort", ", ".join(SORTS)),
            (all(status in known for status in self.statuses), "status", ", ".join(known)),
            (self.limit is None or self.limit >= 1, "limit", "1 or more, or None for all"),
        ):
            if not ok:
                raise ConfigError(f"trajectories: {name} = {getattr(self, name)!r}; allowed: {allowed}")

    @property
    def reward_range(self) -> tuple[float | None, float | None]:
        """The least and the most reward."""
        return self.reward if isinstance(self.reward, tuple) else (self.reward, self.reward)


class RecordReader(Protocol):
    """Reads what a run has recorded; the `local` runtime does."""

    def read_trajectories(self, folder: Path, config: RunConfig, wanted: TrajectoryFilter) -> list[RecordedTrajectory]:
        """Recorded trajectories, in the order that is wanted.

        Raises:
            ConfigError: the run has no journal on this machine.
        """
        ...

    def read_group(self, folder: Path, config: RunConfig, id: str) -> Group:
        """A recorded group, whose trajectories are `RecordedTrajectory`.

        Args:
            folder: of the run.
            config: of the run.
            id: of the group or of one of its episodes, with or without the run's name in front, or a beginning that fits only
                one.

        Raises:
            ConfigError: the run has no journal on this machine, or none or several fit.
        """
        ...


def record_reader() -> RecordReader:
    """What reads the records of runs on this machine."""
    return cast(RecordReader, find_runtime("local"))
