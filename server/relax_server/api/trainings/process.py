"""The process of one run: `python -m relax_server.api.trainings.process`; told what to do on standard input.

It ends when standard input is closed, which is when the service is gone. An interrupt ends training after a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from relax_sdk.config import SamplingParams, run_config_from_dict
from relax_sdk.doctor import senses_findings
from relax_sdk.errors import RelaxError
from relax_sdk.messages import Message
from relax_sdk.run import CONFIG, Run
from relax_sdk.run_lock import RunLock, cannot_write
from relax_sdk.runtime import Job, find_runtime, silent
from relax_server.api.trainings.protocol import Request, Start, Told, spec_of
from relax_server.api.trajectories import whole_evaluation

INTERRUPTED = 3
"""Exit code after a checkpoint was saved on request."""


class LineObserver:
    """Tells the service how the run goes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)  # what others print goes to the log

    def tell(self, message: Told) -> None:
        with self._lock, contextlib.suppress(BrokenPipeError):
            self._out.write(msgspec.json.encode(message) + b"\n")

    def stage(self, text: str) -> None:
        self.tell(Told(kind="stage", text=text))

    def step(self, metrics: dict[str, Any]) -> None:
        self.tell(Told(kind="step", data=json.loads(json.dumps(metrics, default=float))))

    def warn(self, text: str) -> None:
        self.tell(Told(kind="warning", text=text))


def main() -> None:
    """Do what the first line says."""
    observer = LineObserver()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    threading.Thread(target=_listen, args=(lines,), name="service", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell had the service begin with them ignored
        signal.signal(number, signal.default_int_handler)
    try:
        job = _job(start)
        if start.do == "train":
            _train(job, observer)
        else:
            _serve(job, observer, lines)
    except KeyboardInterrupt:
        _leave(INTERRUPTED)
    except RelaxError as error:
        observer.tell(Told(kind="failed", text=str(error), data=type(error).__name__))
        _leave(1)
    except BaseException as error:
        observer.tell(Told(kind="failed", text=f"{type(error).__name__}: {error}", data="RunError"))
        raise
    _leave(0)


def _listen(lines: queue.SimpleQueue[bytes]) -> None:
    while line := sys.stdin.buffer.readline():
        lines.put(line)
    os._exit(1)  # the service is gone; what this process started ends with it


def _leave(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)


def _job(start: Start) -> Job:
    folder = Path(start.folder)
    folder.mkdir(parents=True, exist_ok=True)
    media = folder / "media"
    if not media.is_symlink() and not media.exists():
        media.symlink_to(start.media, target_is_directory=True)  # what the service has stored is not stored twice
    config = run_config_from_dict(start.config)
    agent: Any = start.agent
    return Job(spec_of(start), config, folder, agent, start.resume)


def _train(job: Job, observer: LineObserver) -> None:
    run = Run(job.folder, job.config, job)
    with RunLock(job.folder, job.holder):
        try:
            (job.folder / CONFIG).write_text(json.dumps(job.config.to_dict(), indent=1))
        except OSError as error:
            raise cannot_write(job.folder, error) from error
        try:
            began = time.time()
            find_runtime("local").fit(job, observer)
            for finding in senses_findings(job.folder, began):
                if finding.level != "ok":
                    observer.warn(f"senses, {finding.sentence}")
        finally:
            run.try_plot(observer.warn)
    observer.tell(Told(kind="done"))


def _serve(job: Job, observer: LineObserver, lines: queue.SimpleQueue[bytes]) -> None:
    session = find_runtime("local").open_model(job, silent)
    try:
        observer.tell(Told(kind="ready"))
        while True:
            request = msgspec.json.decode(lines.get(), type=Request)
            try:
                if request.do == "evaluate":
                    done = session.evaluate(request.split, request.limit or job.config.eval.limit, silent)
                    result: Any = msgspec.Raw(whole_evaluation(done))
                else:
                    messages = [Message.from_openai(message) for message in request.messages]
                    result = session.generate(messages, SamplingParams(**request.sampling)).to_openai()
                observer.tell(Told(kind="answer", data=result))
            except RelaxError as error:
                observer.tell(Told(kind="failed", text=str(error), data=type(error).__name__))
    finally:
        session.close()


if __name__ == "__main__":
    main()
