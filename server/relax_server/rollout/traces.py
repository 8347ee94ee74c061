"""The interface of traces: spans of episodes and of what is done in them; off by default."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from relax_sdk.registry import EnvSpec
from relax_sdk.trajectory import Trajectory, Turn
from relax_server.rollout.task import EpisodeTask


class Stage:
    """A span of something that is done in an episode; this one is not kept."""

    def answered(self, turn: Turn) -> None:
        """The model has answered: what it read and wrote."""


class EpisodeTrace:
    """The spans of one episode; this one keeps none.

    A span that an environment's own code opens, with whatever library, lies inside that of the stage in which the code runs.
    """

    def begin(self) -> None:
        """The episode has a place and begins."""

    def stage(self, name: str, tool: str | None = None) -> AbstractContextManager[Stage]:
        """A span of a block; what the block raises is noted on it, and passes through.

        Args:
            name: `reset`, `generate`, `step`, `call_tools`, `tool` or `score`.
            tool: name of the tool that is called.
        """
        return _NOT_KEPT

    def end(self, trajectory: Trajectory) -> None:
        """The episode is over."""


class Traces:
    """Makes the traces of episodes; this one keeps none."""

    def episode(self, run: str, env: EnvSpec, task: EpisodeTask) -> EpisodeTrace:
        """The trace of an episode that will be played."""
        return _OFF

    def close(self) -> None:
        """Send what is left; blocks for a few seconds at most."""


_NOT_KEPT = nullcontext(Stage())
_OFF = EpisodeTrace()
