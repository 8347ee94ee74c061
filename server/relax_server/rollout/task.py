"""`EpisodeTask`: what one episode is to play."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from relax_sdk.config import SamplingParams
from relax_sdk.trajectory import derive_seed


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
    sampling: SamplingParams
    attempt: int = 1

    @property
    def id(self) -> str:
        """Id of the trajectory."""
        return f"{self.group_id}/{self.group_index}"

    def sampling_at(self, turn: int, room: int, own: SamplingParams | None = None) -> SamplingParams:
        """Sampling of a 0-based turn that has room for `room` tokens; with a sampling seed, every turn gets its own.

        Args:
            turn: its number.
            room: tokens that may follow the prompt.
            own: in place of the episode's sampling.
        """
        sampling = own if own is not None else self.sampling
        if room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        if sampling.sampling_seed is not None:
            seed = derive_seed(sampling.sampling_seed, self.split, self.task_index, self.group_index, turn) % 2**31
            sampling = replace(sampling, sampling_seed=seed)
        return sampling
