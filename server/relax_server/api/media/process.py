"""`DecoderProcess`: one process that decodes for the service, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import msgspec
import psutil

from relax_sdk.errors import MediaError
from relax_sdk.media_formats import NOUNS, Kind
from relax_sdk.probing import MediaRef
from relax_server.api.media.limits import DecoderLimits
from relax_server.api.media.wire import greet, receive, receive_answer, send_item
from relax_server.gateway.errors import ApiError

START_SECONDS = 60.0
"""Seconds to load the decoders."""
LAST_SECONDS = 0.2
"""Seconds for a process to end by itself when its connection was closed."""
LOOK_SECONDS = 0.01
END_SECONDS = 5.0
"""Seconds for a killed process to be gone."""
ITEMS = 1000
"""Items after which a process is replaced, as what libraries do not give back adds up."""
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV")
"""Environment variables of the service that it gets; none of them holds a secret."""


class DecoderProcess:
    """Decodes one item at a time; its methods wait, and are called in a thread.

    Args:
        limits: of the process.
    """

    def __init__(self, limits: DecoderLimits) -> None:
        self.limits = limits
        self.items = 0
        """Items it was given."""
        self.busy = False
        """It was given an item that it has not answered."""
        self.spent = 0.0
        """Seconds of a processor that the last item took."""
        self.ended = False
        """It was killed, or has died."""
        self._used = 0.0
        """Seconds of a processor up to the last item."""
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    @property
    def usable(self) -> bool:
        """Whether it can be given another item."""
        gone = self._process is not None and self._process.poll() is not None
        return not (self.busy or self.ended or gone) and self.items < ITEMS

    def check(self, kind: Kind, data: bytes) -> MediaRef:
        """Read an item's header and decode it; the process is started for its first item.

        Raises:
            MediaError: refused, or its decoder hung, crashed or used too much; then the process is gone.
            ApiError: the process cannot be started.
        """
        connection = self._ready()
        self.items += 1
        try:
            connection.settimeout(self.limits.seconds)
            began = time.monotonic()
            send_item(connection, kind, data)
            connection.settimeout(max(0.001, self.limits.seconds - (time.monotonic() - began)))
            answer = receive_answer(connection)
        except TimeoutError as error:
            self.end()
            raise MediaError(f"the {NOUNS[kind]} took longer than {self.limits.seconds:g} s to decode") from error
        except (OSError, EOFError) as error:
            raise MediaError(f"the {NOUNS[kind]} {self._why(self.end())}") from error
        except BaseException:
            self.end()
            raise
        self.busy = False
        self.count()
        if answer.ref is None or answer.ref.kind != kind:
            raise MediaError(answer.refused or f"not a {NOUNS[kind]}")
        return answer.ref

    def _ready(self) -> socket.socket:
        """The way to a process that answers; one that died before this item, which is not to blame, is replaced."""
        if self._connection is not None:
            try:
                self._connection.settimeout(START_SECONDS)
                greet(self._connection)
                return self._connection
            except (OSError, EOFError):
                self._reap()
        return self._start()

    def count(self) -> None:
        """Add the time of a processor since the last look to the item's. May be called in an event loop."""
        if self._process is not None and self._process.returncode is None:  # a dead one's is there until it is waited for
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(self._process.pid).cpu_times()
                used = times.user + times.system
                self.spent, self._used = self.spent + max(0.0, used - self._used), used

    def kill(self) -> None:
        """End the process whatever it does; `check`, in another thread, then raises. May be called in an event loop."""
        self.ended = True
        if self._process is not None:
            self._process.kill()

    def end(self) -> int:
        """Kill the process, wait until it is gone, and return its exit code; negative: the signal it died of."""
        self.ended = True
        return self._reap()

    def _reap(self) -> int:
        if self._connection is not None:
            self._connection.close()
        if self._process is None:
            return 0
        _until_dead(self._process, LAST_SECONDS)  # it may be about to die of what it did, which is to be told
        self.count()
        self._process.kill()
        try:
            return self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL

    def _start(self) -> socket.socket:
        """Start the process and wait until its decoders are loaded.

        Raises:
            ApiError: it cannot be started, or is not ready in time.
        """
        ours, theirs = socket.socketpair()
        self._connection = ours
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        environment |= {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
        command = [sys.executable, "-m", "relax_server.api.media.child", msgspec.json.encode(self.limits).decode()]
        null = subprocess.DEVNULL
        try:
            with theirs:
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=null, stderr=null, env=environment)
            if self.ended:
                raise EOFError("it is wanted no more")
            ours.settimeout(START_SECONDS)
            receive(ours, 1)
            self.count()
            self.spent = 0.0  # what was loaded is no item's
        except (OSError, EOFError) as error:
            self.end()
            message = f"no process to decode media in could be started ({error or type(error).__name__}); try again"
            raise ApiError(503, message, "no_decoder", headers={"Retry-After": "5"}) from error
        return ours

    def _why(self, code: int) -> str:
        if code == -signal.SIGXCPU:
            return f"took longer than {self.limits.cpu_seconds} s of processor time to decode"
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"made its decoder crash ({name}): it is damaged, or needs more than {self.limits.memory >> 20} MiB of memory"


def _until_dead(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until a process has died, or for so long; it is not reaped, so that its time can still be read."""
    end = time.monotonic() + seconds
    if process.returncode is None:
        while time.monotonic() < end and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            time.sleep(LOOK_SECONDS)
