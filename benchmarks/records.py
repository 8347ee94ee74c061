"""What do the records of a run cost a step: those of its tokens, its events and its status?

    python -m benchmarks.records [--env tone-v0] [--steps 60] [--times 5]

The same run is trained with `mode="colocate"`, where nothing overlaps, so that what a record takes is not hidden: with all
records, without those of tokens (`training.record_tokens=False`), and without events and status either, which no setting turns
off: here their writing is left out. The kinds take turns, and each repetition begins with another one; the first quarter of the
steps is left out. Figures are medians over the repetitions, and `cost` is the median of what a kind's step takes more than the
barest one's of the same repetition, as a share of that.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from relax_server.roles.events import EventLog
from relax_server.roles.status import StatusFile

from benchmarks.report import save
from benchmarks.step import train

KINDS = ("all records", "without tokens", "none")
"""What is recorded; the last is what the others are compared with."""
BAR = 0.02
"""Share of a step that all records may take."""


@contextlib.contextmanager
def unwritten() -> Iterator[None]:
    """Let no event and no status be written; the controller of a local run is in this process."""
    with mock.patch.object(EventLog, "add", lambda *_: None), mock.patch.object(StatusFile, "write", lambda *_: None):
        yield


def seconds(kind: str, env: str, steps: int, seed: int) -> float:
    """Seconds of a step of one run."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        if kind == "none":
            stack.enter_context(unwritten())
        training = {"checkpoint_every": 10 * steps, "record_tokens": kind == "all records"}
        return train(env, "colocate", steps, seed, Path(temporary) / "run", training=training)["step"]


def compared(seen: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """A row for each kind.

    Args:
        seen: seconds of a step by kind, of each repetition.
    """
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        steps = [one[kind] for one in seen]
        more = [one[kind] / one[KINDS[-1]] - 1 for one in seen]
        spread = f"{min(steps) * 1e3:.0f}–{max(steps) * 1e3:.0f}"
        figures = {"step ms": statistics.median(steps) * 1e3, "from–to ms": spread, "cost": statistics.median(more)}
        rows.append({"records": kind, "times": len(seen)} | figures)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="tone-v0")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--times", type=int, default=5)
    args = parser.parse_args()
    seen: list[dict[str, float]] = []
    for seed in range(args.times):
        first = seed % len(KINDS)
        seen.append({kind: seconds(kind, args.env, args.steps, seed) for kind in KINDS[first:] + KINDS[:first]})
        print(f"repetition {seed + 1}: " + ", ".join(f"{k} {v * 1e3:.0f} ms" for k, v in seen[-1].items()), flush=True)
    save("records", compared(seen), key="records", env=args.env, steps=args.steps, bars={"cost": f"< {BAR} with all records"})


if __name__ == "__main__":
    main()
