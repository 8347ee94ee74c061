"""`relax serve` as it is, with the environments of the benchmarks registered.

python -m benchmarks.service --engine URL --folder FOLDER [--media-paths]
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.envs import ENDLESS, Echo, EchoAsync, EchoInThreads, Shows, Waits
from benchmarks.processes import Server, module, said, started

ENVS: dict[str, tuple[type, dict[str, Any]]] = {
    "bench-1": (Echo, {"turns": 1}),
    "bench-5": (Echo, {"turns": 5}),
    "bench-steps-async": (EchoAsync, {"turns": ENDLESS}),
    "bench-steps-threads": (EchoInThreads, {"turns": ENDLESS}),
    "bench-waits": (Waits, {"turns": 1, "seconds": 1.0}),
    "bench-shows-3": (Shows, {"turns": 3, "own": False}),
    "bench-shows-own-3": (Shows, {"turns": 3, "own": True}),
}
ROWS = 8192
"""Tasks of each."""


@contextlib.contextmanager
def service(engine: str, folder: Path, media_paths: bool = False) -> Iterator[Server]:
    """The service in a process of its own, for as long as the block lasts.

    Args:
        engine: URL.
        folder: for its journal, media and log.
        media_paths: the engine is told where media lie, not sent their bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = module("benchmarks.service", "--engine", engine, "--folder", folder, *["--media-paths"] * media_paths)
    with started(command, said("ready at "), folder / "serve.log", OMP_NUM_THREADS="1") as server:
        yield server


def main() -> None:
    from relax_server.api.serve import serve
    from relax_server.api.settings import ServiceConfig

    from relax_sdk.registry import register

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--media-paths", action="store_true")
    args = parser.parse_args()
    rows = [{"index": i} for i in range(ROWS)]
    for id, (env, kwargs) in ENVS.items():
        register(id, env, tasks={"train": rows}, kwargs=kwargs)
    serve(ServiceConfig(args.folder, engines=(args.engine,), port=0, media_paths=args.media_paths))


if __name__ == "__main__":
    main()
