"""`relax serve` as it is, with the environments of the benchmarks registered.

python -m benchmarks.service --engine URL --folder FOLDER [--media-paths] [--workers N]
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from benchmarks.processes import Server, module, said, started

WORKER_BYTES = 384 << 20
"""Memory of the worker of an environment that is uploaded."""


@contextlib.contextmanager
def service(engine: str, folder: Path, media_paths: bool = False, workers: int = 1) -> Iterator[Server]:
    """The service in a process of its own, for as long as the block lasts.

    Args:
        engine: URL.
        folder: for its journal, media and log.
        media_paths: the engine is told where media lie, not sent their bytes.
        workers: processes that answer requests.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = module("benchmarks.service", "--engine", engine, "--folder", folder, "--workers", workers)
    command += ["--media-paths"] * media_paths
    with started(command, said("ready at "), folder / "serve.log", OMP_NUM_THREADS="1") as server:
        yield server


def main() -> None:
    from relax_server.api.environments.limits import WorkerLimits
    from relax_server.api.serve import serve
    from relax_server.api.settings import ServiceConfig

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--media-paths", action="store_true")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    config = ServiceConfig(
        args.folder,
        engines=(args.engine,),
        port=0,
        media_paths=args.media_paths,
        workers=args.workers,
        worker_limits=WorkerLimits(memory=WORKER_BYTES),
    )
    serve(config, ["benchmarks.service_envs"])


if __name__ == "__main__":
    main()
