"""The control of a run: engines over HTTP, for whoever can read the run folder's `control.json`."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from relax_sdk.config import EngineKind, WeightsWay
from relax_sdk.control import CONTROL
from relax_sdk.errors import ConfigError, RelaxError
from relax_server.guard import Guard, hosts_of
from relax_server.guard.on_aiohttp import guarded
from relax_server.roles.fleet import DRAIN_SECONDS, EngineConflict, EngineFleet, EngineInfo

HOST = "127.0.0.1"
MAX_BODY = 64 << 10
MAX_DRAIN = 3600.0
CLOSE_SECONDS = 1.0
"""Seconds for answers that are being given when the run ends."""


class RunControlServer:
    """`GET`, `POST /v1/engines` and `GET`, `DELETE /v1/engines/{id}`, on this machine only.

    Args:
        folder: of the run; gets `control.json`, which only its user can read.
        fleet: the engines.
        stats: of the rollout's pool, by engine.
    """

    def __init__(self, folder: Path, fleet: EngineFleet, stats: Callable[[], list[dict[str, Any]]]) -> None:
        self.folder, self.fleet = folder, fleet
        self._stats = stats
        self._key = f"rlc_{secrets.token_urlsafe(32)}"
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen, and say where in `control.json`."""
        wanted = f"the key of this run, which is in {CONTROL} in its folder"
        guard = Guard(self._key, hosts_of(HOST), wanted, open_paths=frozenset())
        app = web.Application(client_max_size=MAX_BODY, middlewares=[guarded(guard), _errors])
        app.router.add_get("/v1/engines", self._list)
        app.router.add_post("/v1/engines", self._add)
        app.router.add_get("/v1/engines/{id}", self._get)
        app.router.add_delete("/v1/engines/{id}", self._remove)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        url = f"http://{HOST}:{self._runner.addresses[0][1]}"
        self._write({"url": url, "key": self._key, "pid": os.getpid(), "host": socket.gethostname()})

    def _write(self, control: dict[str, Any]) -> None:
        new = self.folder / f".{CONTROL}.{os.getpid()}"
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(control, file)
        new.rename(self.folder / CONTROL)

    async def stop(self) -> None:
        """Listen no more."""
        if self._runner is None:
            return
        with contextlib.suppress(OSError):
            (self.folder / CONTROL).unlink(missing_ok=True)
        await self._runner.cleanup()

    # ------------------------------------------------------------------------------------------------------------- routes

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"engines": [self._row(info) for info in self.fleet.infos]})

    async def _get(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        for info in self.fleet.infos:
            if info.id == id:
                return web.json_response(self._row(info))
        return _error(404, f"no engine {id!r}", "engine_not_found")

    async def _add(self, request: web.Request) -> web.Response:
        body = await _body(request)
        kind: EngineKind | None = body.get("kind")  # type: ignore[assignment] - the fleet refuses what is none
        weights: WeightsWay | None = body.get("weights")  # type: ignore[assignment] - as above
        info = self.fleet.add(body.get("id"), body.get("url"), kind, body.get("token"), weights)
        return web.json_response(self._row(info), status=200 if info.state == "current" else 202)

    async def _remove(self, request: web.Request) -> web.Response:
        id, text = request.match_info["id"], request.query.get("drain_seconds", str(DRAIN_SECONDS))
        try:
            drain = float(text)
        except ValueError:
            drain = math.nan
        if not 0 <= drain <= MAX_DRAIN:
            raise ConfigError(f"drain_seconds = {text!r}; allowed: 0 to {MAX_DRAIN:g}")
        info = self.fleet.remove(id, drain)
        if info is None:
            return web.json_response({"id": id, "state": "gone"})
        return web.json_response(self._row(info), status=202)

    def _row(self, info: EngineInfo) -> dict[str, Any]:
        """One engine: what the run and what the rollout's pool know of it."""
        known = next((row for row in self._stats() if row["url"] == info.url), {})
        row = asdict(info) | {"version": self.fleet.version if info.state == "current" else None}
        row |= {name: known.get(name, 0) for name in ("running", "answered", "failed")}
        if info.state == "current" and known and not known["up"]:
            row |= {"state": "out", "reason": known["error"] or ""}
        return row


@web.middleware
async def _errors(request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
    """Answer errors in OpenAI's shape, as the rollout service does."""
    try:
        return await handler(request)
    except EngineConflict as error:
        return _error(409, str(error), "conflict")
    except ConfigError as error:
        return _error(400, str(error), "invalid_value")
    except RelaxError as error:
        return _error(500, str(error), "internal_error")
    except web.HTTPException as error:
        return _error(error.status, f"{request.method} {request.path}: {error.reason}", "http_error")


async def _body(request: web.Request) -> dict[str, str]:
    """`id`, `url`, `kind`, `token` and `weights`, as far as they are given.

    Raises:
        ConfigError: it is something else.
    """
    try:
        body = json.loads(await request.read() or b"{}")
    except ValueError as error:
        raise ConfigError(f"the body is not JSON ({error})") from error
    fields = {"id", "url", "kind", "token", "weights"}
    if not isinstance(body, dict) or set(body) - fields:
        raise ConfigError(f"the body must be an object of {', '.join(sorted(fields))}, all optional")
    for name, value in body.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{name} = {value!r}; allowed: text")
    return body


def _error(status: int, message: str, code: str) -> web.Response:
    kind = {404: "not_found_error", 500: "server_error"}.get(status, "invalid_request_error")
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": code}}, status=status)
