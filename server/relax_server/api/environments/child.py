"""The process that holds a registered environment: `python -m relax_server.api.environments.child FD`; started by `guard`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import msgspec

from relax_sdk.hosting.host import EnvHost, describe, told
from relax_sdk.hosting.protocol import Broken, Hello, encode, read_from_service
from relax_server.api.environments.frames import FROM_WORKER, TO_WORKER, frame, read_frame
from relax_server.api.environments.source import EnvSource, load_spec


def run(fd: int) -> None:
    """Play episodes until the service closes the connection."""
    asyncio.run(_serve(socket.socket(fileno=fd)))
    os._exit(0)  # a thread that hangs must not keep it alive


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    source = await read_frame(reader, TO_WORKER)
    if source is None:
        return
    try:
        spec = load_spec(msgspec.msgpack.decode(source, type=EnvSource))
        hello, host = Hello(describe(spec)), EnvHost(spec)
    except BaseException as error:
        writer.write(frame(encode(Broken(told(error).message)), FROM_WORKER))
        await writer.drain()
        return

    async def send(data: bytes) -> None:
        writer.write(frame(data, FROM_WORKER))
        await writer.drain()

    await send(encode(hello))
    host.connect(send)
    while (data := await read_frame(reader, TO_WORKER)) is not None:
        host.take(read_from_service(data))
    await host.close()


if __name__ == "__main__":
    run(int(sys.argv[1]))
