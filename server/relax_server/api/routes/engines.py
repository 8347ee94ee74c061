"""Engines that come and go: those of the service's own pool, and those of a training run."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Path, Query
from fastapi.responses import Response

from relax_server.api.core import ServiceCore
from relax_server.api.dependencies import Caller, Core, Operator, Trainings
from relax_server.api.engine_roster import EngineAccess
from relax_server.api.routes.runs import Run
from relax_server.api.schemas import EngineBody, RunEngineBody
from relax_server.api.trainings.control import ask_control
from relax_server.api.trainings.hub import TrainingHub
from relax_server.api.trainings.store import Training
from relax_server.engines.addresses import check_address
from relax_server.engines.coalesce import CoalescingEngine
from relax_server.engines.tokens import check_token
from relax_server.gateway.errors import ApiError
from relax_server.gateway.wire import json_response

router = APIRouter()

Id = Annotated[str, Path(max_length=200)]
Drain = Annotated[float, Query(ge=0, le=3600, description="Seconds for calls in flight; the rest begins again elsewhere")]


# ------------------------------------------------------------------------------------------------------------ the service's


@router.get("/v1/engines")
async def list_engines(core: Core, key: Caller) -> Response:
    """The engines of the service, and why one is left out."""
    return json_response({"engines": _rows(core)})


@router.post("/v1/engines", status_code=201)
async def add_engine(core: Core, key: Operator, body: EngineBody) -> Response:
    """Let an engine that runs at `url` join; it must hold the weights that the others hold. Adding it again changes nothing."""
    named = [urlsplit(url).hostname or "" for url in core.config.engines]
    url = check_address(body.url, named)
    there = {row["url"]: row for row in _rows(core)}
    if url in there and not there[url]["draining"]:
        return json_response(there[url])
    known = core.config.engine_token if urlsplit(url).hostname in named else ""
    token = known if body.token is None else check_token(body.token, "token")
    access = EngineAccess(url, token, inline=not core.config.media_paths)
    engine = await access.connect()
    try:
        await _check_weights(core, engine)
    except BaseException:
        await engine.close()
        raise
    core.engines.add(access, engine)
    await core.engines.share()
    return json_response(next(row for row in _rows(core) if row["url"] == url), 201)


async def _check_weights(core: ServiceCore, engine: CoalescingEngine) -> None:
    """Refuse an engine with other weights than one that is in use.

    Raises:
        ApiError: they are of another version.
    """
    up = {row["url"] for row in core.pool.stats() if row["up"] and not row["draining"]}
    other = next((known for known in core.pool.engines if known.url in up), None)
    if other is None:
        return
    theirs, its = [str((await known.model_info()).get("weight_version")) for known in (other, engine)]
    if theirs != its:
        message = f"the engine {engine.url} holds weights of version {its}; those in use are of version {theirs}"
        raise ApiError(409, message, "other_weights", "url")


@router.delete("/v1/engines/{id}")
async def remove_engine(core: Core, key: Operator, id: Id, drain_seconds: Drain = 60.0) -> Response:
    """Give an engine (`HOST:PORT`) nothing new, and forget it when its calls are done; one that is gone already is no error."""
    row = next((row for row in _rows(core) if row["id"] == id), None)
    if row is None:
        return json_response({"id": id, "state": "gone"})
    if not any(other["state"] == "current" for other in _rows(core) if other["id"] != id):
        raise ApiError(409, f"engine {id} is the last one, and stays; add another before", "last_engine")
    if not row["draining"]:
        core.engines.remove(row["url"], drain_seconds)
        await core.engines.share(drain_seconds)
    return json_response(row | {"state": "draining", "draining": True}, 202)


def _rows(core: ServiceCore) -> list[dict[str, Any]]:
    rows = []
    for row in core.pool.stats():
        state = "draining" if row["draining"] else "current" if row["up"] else "out"
        rows.append(
            {"id": urlsplit(row["url"]).netloc, "state": state, "reason": "" if row["up"] else row["error"] or ""} | row
        )
    return rows


# -------------------------------------------------------------------------------------------------------- a training run's


@router.get("/v1/runs/{id}/engines")
async def list_run_engines(trainings: Trainings, run: Run) -> Response:
    """The engines of a run that is under way."""
    return json_response((await ask_control(trainings.folder / run.id, "GET"))[1])


@router.post("/v1/runs/{id}/engines", status_code=202)
async def add_run_engine(trainings: Trainings, run: Run, key: Operator, body: RunEngineBody) -> Response:
    """Begin to add an engine to a run: a new one, or one that runs at `url`; one of that id that is there already stays."""
    await _check_number(trainings, run, body)
    status, answer = await ask_control(trainings.folder / run.id, "POST", body=body.model_dump(exclude_none=True))
    return json_response(answer, status)


async def _check_number(trainings: TrainingHub, run: Training, body: RunEngineBody) -> None:
    """Refuse more engines than runs may have here.

    Raises:
        ApiError: there are so many already.
    """
    most = trainings.core.config.max_engines
    there = (await ask_control(trainings.folder / run.id, "GET"))[1]["engines"]
    if len(there) >= most and not any(row["id"] == body.id or (body.url and row["url"] == body.url) for row in there):
        raise ApiError(409, f"the run has {len(there)} engines; allowed here: at most {most}", "too_many_engines")


@router.delete("/v1/runs/{id}/engines/{engine}")
async def remove_run_engine(
    trainings: Trainings,
    run: Run,
    key: Operator,
    engine: Annotated[str, Path(max_length=64)],
    drain_seconds: Drain = 60.0,
) -> Response:
    """Begin to remove an engine from a run; one that is gone already is no error."""
    folder = trainings.folder / run.id
    status, answer = await ask_control(folder, "DELETE", engine, drain_seconds=drain_seconds)
    return json_response(answer, status)
