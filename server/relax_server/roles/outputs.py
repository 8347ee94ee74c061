"""What a run writes for people to look at: metrics as JSON lines, and TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from relax_server.roles.layout import RunLayout


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


class Outputs:
    """Appends to a run folder; a line is whole or absent, also after a crash."""

    def __init__(self, layout: RunLayout) -> None:
        self._file = layout.metrics.open("a", buffering=1)
        layout.tensorboard.mkdir(exist_ok=True)
        self._events = EventFile(layout.tensorboard)

    def write(self, metrics: dict[str, Any]) -> None:
        """One step's metrics; writing a step again replaces it for readers.

        Raises:
            OSError: they cannot be written, as on a full disk.
        """
        self._file.write(json.dumps(metrics, default=float) + "\n")
        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in flatten(metrics) if math.isfinite(value)]
        if "sample" in metrics:
            scalars.append(text_pb("sample/text_summary", sample_text(metrics["sample"])).value[0])
        event = Event(wall_time=time.time(), step=int(metrics["step"]), summary=Summary(value=scalars))
        self._events.add(event)

    def close(self) -> None:
        """Close the files. What could not be written has been told of by `write`."""
        self._events.close()
        with contextlib.suppress(OSError):
            self._file.close()


def sample_text(sample: dict[str, str]) -> str:
    """A sample answer as Markdown, in which TensorBoard shows texts."""
    asked, answer = (sample[name].replace("`", "'") for name in ("asked", "answer"))
    return f"reward {sample['reward']}\n\n```\n{asked}\n```\n\n```\n{answer}\n```"


def flatten(metrics: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Numbers of nested dictionaries as (`outer/inner`, value)."""
    out: list[tuple[str, float]] = []
    for name, value in metrics.items():
        if isinstance(value, dict):
            out += flatten(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            out.append((prefix + name, float(value)))
    return out


def drop_after(path: Path, step: int) -> None:
    """Forget metrics of steps after `step`: the run goes on from there."""
    if not path.exists():
        return
    rows = [line for line in path.read_text().splitlines() if line.endswith("}") and json.loads(line)["step"] <= step]
    path.write_text("".join(row + "\n" for row in rows))
