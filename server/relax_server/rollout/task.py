"""`EpisodeTask`: what one episode is to play."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from relax_sdk.config import SamplingParams
from relax_sdk.trajectory import derive_seed
from relax_server.rollout.lenses import Lens


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
    run_seed: int
    """What the sampling of the episode's answers is derived from, unless `sampling` has a seed."""
    sampling: SamplingParams
    attempt: int = 1
    lens: Lens | None = None
    """Changes what the policy is shown; None: nothing."""

    @property
    def id(self) -> str:
        """Id of the trajectory."""
        return f"{self.group_id}/{self.group_index}"

    def sampling_at(self, call: int, room: int, own: SamplingParams | None = None) -> SamplingParams:
        """Sampling of one model call that has room for `room` tokens, with a seed of its own.

        The seed follows from the run's seed (or `sampling_seed`), the split, the task, the position in the group and the call;
        from the attempt, too, when the episode is tried again, as it would else go the way on which it failed.

        Args:
            call: its 0-based number in the episode.
            room: tokens that may follow the prompt.
            own: in place of the episode's sampling.
        """
        sampling = own if own is not None else self.sampling
        if room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        base = self.run_seed if sampling.sampling_seed is None else sampling.sampling_seed
        again = (self.attempt,) if self.attempt > 1 else ()
        seed = derive_seed(base, "sampling", self.split, self.task_index, self.group_index, call, *again)
        return sampling.with_seed(seed % 2**31)
