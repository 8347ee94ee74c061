"""TensorBoard: event files in the run folder."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from relax_sdk.errors import MediaError
from relax_server.trackers.base import End, TrackedRun, Tracker
from relax_server.trackers.samples import SampleAnswer, has_media, sample_text
from relax_server.trackers.tensorboard_media import summary

FOLDER = "tensorboard"
MEDIA_BYTES = 64 << 20
"""Media that one start of a run writes; later samples are texts alone."""


class EventFile:
    """A file of TensorBoard events.

    TensorBoard's own writer has a thread, which prints a traceback of its own where a disk is full and leaves the error to the
    next event. Here each event is on the disk when `add` returns, or `add` raises.

    Args:
        folder: of the run's events; each start of a run writes a file of its own.
    """

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self.add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, event: Event) -> None:
        """Write an event.

        Raises:
            OSError: it cannot be written.
        """
        self._records.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """Close the file. What could not be written has been told of by `add`."""
        with contextlib.suppress(OSError):
            self._file.close()


class TensorBoardTracker(Tracker):
    """Writes scalars and sample answers with their media as events into `tensorboard/` of the run folder."""

    def __init__(self) -> None:
        self._events: EventFile | None = None
        self._left = MEDIA_BYTES

    def begin(self, run: TrackedRun) -> None:
        folder = run.folder / FOLDER
        folder.mkdir(exist_ok=True)
        self._events = EventFile(folder)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._add(step, [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()])

    def samples(self, step: int, samples: Sequence[SampleAnswer]) -> None:
        text = "\n\n".join(map(sample_text, samples))
        self._add(step, [text_pb("sample/text_summary", text).value[0]])
        if has_media(step):
            self._add(step, self._media(samples))

    def _media(self, samples: Sequence[SampleAnswer]) -> list[Any]:
        """Images, sounds and films of the samples, until there are `MEDIA_BYTES` of them."""
        values = []
        for sample in samples:
            for number, item in enumerate(sample.media):
                name = sample.which.rpartition(" ")[2]
                try:
                    value = summary(f"sample/{name}/{item.ref.kind}/{number}", item)
                except (MediaError, OSError):
                    continue  # gone or damaged: the text is there, and the trainer tells of media that it cannot use
                if value is not None and self._left >= value.ByteSize():
                    self._left -= value.ByteSize()
                    values.append(value)
        return values

    def _add(self, step: int, values: list[Any]) -> None:
        assert self._events is not None
        self._events.add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self, end: End) -> None:
        if self._events is not None:
            self._events.close()
