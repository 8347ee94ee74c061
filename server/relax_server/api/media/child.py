"""The process in which media of strangers are decoded: `python -m relax_server.api.media.child LIMITS`.

It reads items from the socket that is its standard input and answers each, until the service closes it. It may write no file,
and has a limit of memory and, for each item, of processor time. A decoder that crashes is its end and nobody else's.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from pathlib import Path

import msgspec

from relax_sdk.errors import MediaError
from relax_sdk.media_formats import Kind
from relax_sdk.probing import probe, verify
from relax_server.api.media.limits import DecoderLimits
from relax_server.api.media.wire import READY, Checked, receive_item, send_answer

FILES = 64
"""File descriptors that it may have."""
NICE = 5


def main() -> None:
    """Answer items until the service is gone."""
    limits = msgspec.json.decode(sys.argv[1], type=DecoderLimits)
    connection = socket.socket(fileno=0)
    _load_decoders()
    _limit(limits)
    connection.sendall(READY)
    while True:
        try:
            kind, data = receive_item(connection)
        except EOFError:
            return
        _allow_processor_time(limits.cpu_seconds)
        send_answer(connection, _check(kind, data))


def _check(kind: Kind, data: bytes) -> Checked:
    """Read an item's header and decode it."""
    try:
        ref = probe(data, kind)
        verify(data, ref)
        return Checked(ref)
    except MediaError as error:
        return Checked(refused=str(error))
    except Exception as error:
        return Checked(refused=f"not a readable {kind} ({type(error).__name__}: {error})")


def _load_decoders() -> None:
    """Before the limits hold and an item's time begins."""
    import av
    import decord
    import soundfile
    import soxr
    from PIL import Image

    Image.init()
    assert av and decord and soundfile and soxr


def _limit(limits: DecoderLimits) -> None:
    """Memory counts what can be written, not what is mapped: libraries map more than they use."""
    for what, value in (
        (resource.RLIMIT_DATA, _data_bytes() + limits.memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))
    os.nice(NICE)


def _data_bytes() -> int:
    """Private memory of this process that can be written."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


def _allow_processor_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


if __name__ == "__main__":
    main()
