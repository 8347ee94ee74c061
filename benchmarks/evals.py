"""Tasks a second of `relax eval` beside verifiers' `vf-eval`, with the same fake endpoint that answers at once.

    make .venv-peers
    python -m benchmarks.evals --python .venv-peers/bin/python [--tasks 1000] [--times 3]

Both play one-turn echo tasks, 64 at once, and keep what was said: verifiers its traces in JSON lines, `relax eval` a durable
journal, and a report with intervals. They take turns in one run and share the machine with the endpoint. verifiers plays by its
quickest way, a harness in its own process (`peers/verifiers_echo`).

*Tasks a second* is from the 64th task that was over to the last, starts left out: verifiers tells it by its own clock, ours is
from the times of the journal's rows. *Command, s* is the whole command, from its start to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_server.journal import open_journal

from benchmarks.gyms import CONCURRENT, LIMIT, Figures, verifiers_episodes
from benchmarks.processes import module, said, started
from benchmarks.report import save
from relax_sdk import EvalReport

BAR = 3.0
"""How many times verifiers' tasks a second ours are to be."""


def our_eval(engine: str, folder: Path, tasks: int) -> Figures:
    """`relax eval` as a user starts it.

    Raises:
        RuntimeError: it failed, or a task is missing.
    """
    out = folder / f"eval-{time.monotonic_ns()}"
    command = [
        sys.executable,
        "-m",
        "relax_sdk.cli",
        "eval",
        "benchmarks.eval_env:Echo",
        "--limit",
        str(tasks),
        "--out",
        str(out),
    ]
    command += ["--engine-url", f"{engine}/v1", "--engine-model", "fake", "--concurrency", str(CONCURRENT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(f"relax eval: {done.stderr[-3000:]}")
    report = EvalReport.load(out)
    if not report.complete or len(report.episodes) != tasks or report.scores.failures:
        raise RuntimeError(f"relax eval: {len(report.episodes)} of {tasks} episodes, {report.scores.failures} failed")
    journal = open_journal(out / "journal.db")
    ends = sorted(row.created_at for row in journal.trajectories(out.name, "eval", limit=tasks))
    journal.close()
    return Figures(tasks - CONCURRENT, ends[-1] - ends[CONCURRENT - 1], 0.0)


def verifiers_eval(python: Path, engine: str, folder: Path, tasks: int) -> Figures:
    """`vf-eval`; see `peers/verifiers_episodes.py`."""
    return asyncio.run(verifiers_episodes(python, engine, folder)(1, tasks - CONCURRENT))


def timed(measure: Callable[[], Figures]) -> dict[str, float]:
    began = time.perf_counter()
    figures = measure()
    return {"tasks/s": figures.episodes / figures.seconds, "command, s": time.perf_counter() - began}


def rows(seen: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians, the range of the rates, and ours beside verifiers'."""
    out = []
    middle = {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in seen.items()}
    first = next(iter(middle.values()))
    for name, figures in middle.items():
        rates = [run["tasks/s"] for run in seen[name]]
        ratio = {
            "ours / it, tasks/s": first["tasks/s"] / figures["tasks/s"],
            "it / ours, s": figures["command, s"] / first["command, s"],
        }
        out.append({"system": name, **figures, "range": f"{min(rates):.0f} … {max(rates):.0f}", **ratio})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="of an environment with verifiers: make .venv-peers")
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seen: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        with started(module("benchmarks.fake_engine"), said("engine at "), root / "engine.log") as engine:
            systems: dict[str, Callable[[], Figures]] = {
                "relax eval": lambda: our_eval(engine.url, root, args.tasks),
                "verifiers 0.4.0": lambda: verifiers_eval(args.python, engine.url, root, args.tasks),
            }
            for repetition in range(args.times):
                for name, measure in systems.items():
                    seen.setdefault(name, []).append(timed(measure))
                print(f"repetition {repetition + 1} of {args.times} done", flush=True)
    table = rows(seen)
    ratio = table[-1]["ours / it, tasks/s"]
    bars = {f"{BAR:g} times verifiers' tasks a second": "met" if ratio >= BAR else f"missed: {ratio:.2f}"}
    save("evals", table, tasks=args.tasks, times=args.times, bars=bars, engine="fake")


if __name__ == "__main__":
    main()
