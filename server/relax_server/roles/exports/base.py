"""What every export reads: the run's episodes and the bytes of their media."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from relax_sdk.config import RunConfig
from relax_sdk.exporting import ExportRequest
from relax_sdk.media import MediaKey, MediaRef, MediaStore
from relax_sdk.media_places import media_places
from relax_sdk.recorded import RecordedTrajectory
from relax_sdk.showing import Shelf
from relax_sdk.trajectory import Status, Trajectory
from relax_server.journal.base import Journal
from relax_server.roles.layout import RunLayout
from relax_server.roles.looking import count_examples, iter_groups, iter_trajectories

IMITATED = ("sft", "preferences")
"""Formats that models are trained on, to answer so."""
USABLE = (Status.COMPLETED, Status.TRUNCATED)


@dataclass(frozen=True)
class Source:
    """The episodes of a run that are to be written."""

    journal: Journal
    config: RunConfig
    layout: RunLayout
    request: ExportRequest
    skipped: Counter[str]
    """What was left out, by the reason."""

    def trajectories(self) -> Iterator[RecordedTrajectory]:
        """The episodes in the order that is wanted."""
        return iter_trajectories(self.journal, self.layout, self.request.wanted, self._played())

    def groups(self) -> Iterator[list[RecordedTrajectory]]:
        """The episodes that are wanted, those of a group together."""
        return iter_groups(self.journal, self.layout, self.request.wanted, self._played())

    def _played(self) -> bool:
        """Whether examples of the warm-up are left out, and counted: nobody should imitate their random answers unasked."""
        wanted = self.request.wanted
        if self.request.format not in IMITATED or wanted.split is not None:
            return False
        if n := count_examples(self.journal, self.layout, wanted):
            self.skipped["examples of the warm-up, whose answers are random; --split warmup writes them"] += n
        return True

    def media(self, trajectory: Trajectory, messages: list[dict]) -> list[MediaRef]:
        """The media that messages of an episode name, in order."""
        shelf = Shelf(trajectory.turns, self.layout.media)
        keys: list[MediaKey] = [(place.kind, place.name) for place in media_places(messages) if place.name is not None]
        return [shelf.find(key) or MediaRef(key[1], f"{key[0]}/unknown", 0) for key in keys]

    def read(self, ref: MediaRef) -> bytes | None:
        """The bytes of an item; None: they are gone, which is counted."""
        path = MediaStore(self.layout.media).path(ref)
        try:
            return path.read_bytes()
        except OSError:
            self.skipped[f"media whose file {ref.sha256[:12]}… is gone"] += 1
            return None
