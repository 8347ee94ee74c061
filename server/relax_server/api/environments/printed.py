"""What a worker prints, on its way to the log: without anything that a terminal would obey, and not without end."""

from __future__ import annotations

import codecs
import os
import threading

from relax_sdk.printable import printable

LOG_LIMIT = 16 << 20
"""Bytes, after which a worker's log is begun anew."""
_PIECE = 1 << 16


class PrintedLines(threading.Thread):
    """Copies what a worker prints to its log, until all have closed the pipe.

    Args:
        pipe: where it is read.
        log: a file open for appending.
    """

    def __init__(self, pipe: int, log: int) -> None:
        super().__init__(name="log", daemon=True)
        self._pipe, self._log = pipe, log

    def run(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while piece := os.read(self._pipe, _PIECE):
            if os.fstat(self._log).st_size > LOG_LIMIT:
                os.ftruncate(self._log, 0)
            os.write(self._log, printable(decoder.decode(piece)).encode())
