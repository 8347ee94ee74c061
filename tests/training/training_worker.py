"""A process that Megatron may patch: tests send it functions, so that torch stays as it is in the process of the tests."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from typing import Any

import cloudpickle

TIMEOUT = 180.0
"""Seconds for one function."""


class Worker:
    """One spawned process that runs one function after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        """Start a function; its module need not be importable there."""
        module = sys.modules[function.__module__]
        cloudpickle.register_pickle_by_value(module)
        try:
            self._pipe.send_bytes(cloudpickle.dumps((function, args)))
        finally:
            cloudpickle.unregister_pickle_by_value(module)

    def receive(self) -> Any:
        """What the function returned; an exception is raised again, with the traceback of the process as a note."""
        if not self._pipe.poll(TIMEOUT):
            self.close()
            raise TimeoutError(f"no answer in {TIMEOUT:.0f} s")
        error, value = cloudpickle.loads(self._pipe.recv_bytes())
        if error is not None:
            value.add_note(error)
            raise value
        return value

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run a function there and wait for it."""
        self.send(function, *args)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = (None, function(*args))
        except BaseException as error:
            answer = (traceback.format_exc(), error)
        pipe.send_bytes(cloudpickle.dumps(answer))
