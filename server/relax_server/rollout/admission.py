"""Admission: how many train groups may be under way, so that none is older than `max_staleness` when it is trained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Admission:
    """A new train group starts only while `outstanding < limit`, which is `(batches_ahead + 1) * groups_per_step`.

    A group that starts then is in one of the next `batches_ahead + 1` batches. Each batch raises the weights' version by
    `updates_per_batch`, so that at its lease the group is at most `batches_ahead * updates_per_batch <= max_staleness` old.
    Towards the end of a run the limit falls to what its last steps still need, so that no group is played for nothing; one
    that fails or is dropped is replaced all the same.
    """

    batches_ahead: int
    groups_per_step: int
    steps: int
    """Training steps of the whole run."""
    in_flight: int = 0
    """Groups being played or written."""
    committed: int = 0
    """Groups of the run in the journal."""
    consumed: int = 0
    """Groups inside steps whose weights have been published."""
    dropped: int = 0
    """Groups that the trainer dropped as stale or set aside."""

    @property
    def outstanding(self) -> int:
        """Groups that will still be trained, or dropped."""
        return self.in_flight + self.committed - self.consumed - self.dropped

    @property
    def limit(self) -> int:
        """Groups that may be outstanding."""
        return min((self.batches_ahead + 1) * self.groups_per_step, self.steps * self.groups_per_step - self.consumed)

    @property
    def open(self) -> bool:
        """Whether a group may start."""
        return self.outstanding < self.limit
