"""Environments: listed, registered, removed, and hosted by whoever connects."""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, WebSocket
from fastapi.responses import Response

from relax_sdk.errors import RelaxError
from relax_sdk.hosting.protocol import Hello, Refused, Welcome, encode, read_from_host
from relax_server.api.auth import caller, watched
from relax_server.api.core import ServiceCore
from relax_server.api.dependencies import Caller, Core, Uploader
from relax_server.api.environments.sockets import SocketLink
from relax_server.api.environments.source import EnvSource
from relax_server.api.key_watch import REASON_LENGTH, UNAUTHORISED, hang_up
from relax_server.api.schemas import EnvBody
from relax_server.gateway.errors import bad, unknown
from relax_server.gateway.wire import json_response

router = APIRouter()

Id = Annotated[str, Path(max_length=200)]
UNREADABLE = 1003
HELLO_SECONDS = 30.0


@router.get("/v1/envs")
async def envs(core: Core, key: Caller) -> Response:
    """The environments that can be played."""
    await core.envs.load()
    return json_response({"envs": core.envs.rows()})


@router.get("/v1/envs/{id:path}")
async def env(core: Core, key: Caller, id: Id) -> Response:
    """One environment."""
    await core.envs.find(id)
    found = next((row for row in core.envs.rows() if row["id"] == id), None)
    if found is None:
        raise unknown("environment", id)
    return json_response(found)


@router.post("/v1/envs", status_code=201)
async def register(core: Core, key: Uploader, body: EnvBody) -> Response:
    """Register an environment; its code runs in a worker process of its own. Takes a key with the right to upload."""
    description = await core.envs.register(_source(body), key)
    return json_response(msgspec.to_builtins(description), 201)


@router.delete("/v1/envs/{id:path}")
async def remove(core: Core, key: Uploader, id: Id) -> Response:
    """Forget an environment that was registered; its owner or an admin may."""
    await core.envs.remove(id, key)
    return json_response({"id": id, "removed": True})


@router.websocket("/v1/env-host")
async def env_host(socket: WebSocket) -> None:
    """An environment that runs in the caller's process; see `relax_sdk.host`."""
    core: ServiceCore = socket.app.state.core
    try:
        key = await caller(socket, core)
    except RelaxError as error:
        await socket.close(UNAUTHORISED, str(error)[:REASON_LENGTH])
        return
    await socket.accept()
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            hello = read_from_host(await socket.receive_bytes())
        if not isinstance(hello, Hello):
            raise bad("the first message of a host must be a hello")
        link = core.envs.attach(hello.env, hello.token, key)
    except RelaxError as error:
        await socket.send_bytes(encode(Refused(str(error))))
        await socket.close(UNREADABLE)
        return
    except TimeoutError:
        await socket.close(UNREADABLE, f"no hello within {HELLO_SECONDS:.0f} s")
        return
    except (KeyError, RuntimeError):  # text, or gone
        return
    await socket.send_bytes(encode(Welcome(hello.env.id, link.token)))
    over = core.watch.use(watched(socket), lambda why: core.spawn(_dismiss(core, link, socket, why)))
    try:
        if await link.serve(socket):
            await core.envs.leave(link)
    except RelaxError as error:
        await socket.close(UNREADABLE, str(error)[:REASON_LENGTH])
    finally:
        over()


async def _dismiss(core: ServiceCore, link: SocketLink, socket: WebSocket, why: str) -> None:
    """A host's key works no more: its connection ends, and its environment goes."""
    await hang_up(socket, why)
    await core.envs.leave(link)


def _source(body: EnvBody) -> EnvSource:
    """Where the code comes from.

    Raises:
        ApiError: not exactly one way was named, or what was uploaded is not base64.
    """
    ways: dict[str, Any] = {"entry": body.entry, "package": body.package, "upload": body.upload}
    named = [name for name, value in ways.items() if value is not None]
    if len(named) != 1:
        raise bad(f"name one of entry, package and upload; got {', '.join(named) or 'none'}")
    if body.entry is not None:
        return EnvSource(id=body.id, kind="import", entry=body.entry, tasks=body.tasks)
    if body.package is not None:
        return EnvSource(id=body.id, kind="package", package=body.package, entry=body.name or "")
    try:
        payload = base64.b64decode(body.upload or "", validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad(f"upload is not base64 ({error})", "upload") from error
    return EnvSource(id=body.id, kind="upload", payload=payload, python=body.python)
