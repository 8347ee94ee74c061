"""Episodes per second of the rollout core alone: a scripted engine that answers at once, a real processor, a real journal.

    python -m benchmarks.episodes [--groups 128] [--size 16] [--repeats 3]

Everything but the model is what a run uses. CPU time is of the whole process, threads included; on a machine with other
work it is steadier than wall time. The second table is what a call in a thread costs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from relax_server.journal import open_journal
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.rollout import EnginePool, RolloutWorker
from relax_server.rollout.threads import CallThreads

import relax_sdk as relax
from benchmarks.envs import Echo, EchoAsync, EchoInThreads
from benchmarks.report import save
from relax_sdk import EnvSpec, Image, MediaStore, RolloutConfig, RunConfig
from tests.scripted_engine import ScriptedEngine


class Shows(Echo):
    """One picture per task, the same for the whole group."""

    modalities = {"image"}

    def reset(self, *, seed=None, options=None):  # type: ignore[override]
        super().reset(seed=seed, options=options)
        rng = np.random.default_rng(options["task"]["index"])  # type: ignore[index]
        return [Image.from_array(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)), "which colour?"], {}


CASES: dict[str, tuple[type[relax.Env], int]] = {
    "text, 1 turn": (Echo, 1),
    "text, 5 turns": (Echo, 5),
    "text, 1 turn, async env": (EchoAsync, 1),
    "text, 1 turn, env in threads": (EchoInThreads, 1),
    "image, 1 turn": (Shows, 1),
}


async def play(processor: Processor, env: type[relax.Env], turns: int, groups: int, size: int) -> tuple[float, float]:
    """Play `groups` groups of `size`; returns wall and CPU seconds."""
    config = RunConfig(
        env="bench-v0", max_staleness=0, rollout=RolloutConfig(groups_per_step=groups, group_size=size, concurrency=2048)
    )
    with tempfile.TemporaryDirectory() as folder:
        journal = open_journal(Path(folder) / "journal.db")
        pool = EnginePool([ScriptedEngine(processor)])
        spec = EnvSpec("bench-v0", env, None, {"turns": turns})
        worker = RolloutWorker(spec, config, processor, pool, MediaStore(Path(folder) / "media"), journal, "bench")
        wall, cpu = time.perf_counter(), time.process_time()
        running = asyncio.create_task(worker.run())
        while worker.admission.committed < groups and not running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        worker.stop()
        await running
        await worker.close()
        journal.close()
    return wall, cpu


async def hops(callers: int, calls: int = 8000) -> dict[str, float]:
    """Wall microseconds per call of a function that does nothing, by `callers` at once."""
    loop, threads, executor = asyncio.get_running_loop(), CallThreads("hop", 64), ThreadPoolExecutor(64)

    async def through_executor() -> None:
        await loop.run_in_executor(executor, int)

    async def through_threads() -> None:
        await threads.call(int, limit=60.0)

    async def measure(one: Callable[[], Any]) -> float:
        async def several() -> None:
            for _ in range(calls // callers):
                await one()

        started = time.perf_counter()
        await asyncio.gather(*(several() for _ in range(callers)))
        return (time.perf_counter() - started) / (calls // callers * callers) * 1e6

    found: dict[str, list[float]] = {"ThreadPoolExecutor": [], "CallThreads": []}
    for _ in range(3):
        found["ThreadPoolExecutor"].append(await measure(through_executor))
        found["CallThreads"].append(await measure(through_threads))
    threads.close()
    executor.shutdown()
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=128)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    processor = Processor.load(resolve_model("relax/tiny-omni"))
    n = arguments.groups * arguments.size
    runs: dict[str, list[tuple[float, float]]] = {case: [] for case in CASES}
    for _, (case, (env, turns)) in itertools.product(range(arguments.repeats), CASES.items()):
        runs[case].append(asyncio.run(play(processor, env, turns, arguments.groups, arguments.size)))
    rows: list[dict[str, Any]] = []
    for case, (_, turns) in CASES.items():
        wall, cpu = (statistics.median(values) for values in zip(*runs[case], strict=True))
        rows.append(
            {
                "case": case,
                "episodes/s": round(n / wall),
                "turns/s": round(n * turns / wall),
                "CPU ms per episode": round(cpu / n * 1e3, 3),
                "episodes per CPU second": round(n / cpu),
            }
        )
    settings = {"groups": arguments.groups, "group_size": arguments.size, "repeats": arguments.repeats}
    save("episodes", rows, settings=settings)
    hop_rows = [{"callers at once": callers} | asyncio.run(hops(callers)) for callers in (1, 16, 256, 2000)]
    save("thread_hops", hop_rows, unit="µs of wall time per call")


if __name__ == "__main__":
    main()
