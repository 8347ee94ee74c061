"""Training runs on the service's machines: what `Trainer(..., server=url).fit()` calls."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Path, Query, WebSocket
from fastapi.responses import FileResponse, Response
from starlette.requests import Request

from relax_sdk.run import METRICS
from relax_server.api.dependencies import Caller, Core, Trainings
from relax_server.api.environments.sockets import Relay
from relax_server.api.event_stream import Ending, follow
from relax_server.api.key_watch import UNAUTHORISED
from relax_server.api.schemas import EvaluateBody, GenerateBody, RunBody
from relax_server.api.trainings.hub import TrainingHub
from relax_server.api.trainings.protocol import Request as ModelRequest
from relax_server.api.trainings.store import Training
from relax_server.gateway.errors import unknown
from relax_server.gateway.wire import bearer, json_response

router = APIRouter()


async def _run(trainings: Trainings, key: Caller, id: Annotated[str, Path(max_length=64)]) -> Training:
    return await trainings.get(id, key)


Run = Annotated[Training, Depends(_run)]


@router.post("/v1/runs", status_code=202)
async def submit(
    trainings: Trainings,
    key: Caller,
    body: RunBody,
    idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> Response:
    """Start a training run; with an `Idempotency-Key`, repeating the request changes nothing."""
    training, new = await trainings.submit(body, key, idempotency_key)
    return json_response(asdict(training), 202 if new else 200)


@router.get("/v1/runs")
async def list_runs(trainings: Trainings, key: Caller, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> Response:
    """The caller's runs, newest first."""
    return json_response({"runs": [asdict(training) for training in await trainings.list(key, limit)]})


@router.get("/v1/runs/{id}")
async def get_run(run: Run) -> Response:
    """State and step."""
    return json_response(asdict(run))


@router.delete("/v1/runs/{id}")
async def cancel_run(trainings: Trainings, run: Run) -> Response:
    """End a run after a checkpoint, which its state and events tell of; what it has made stays, and it can go on."""
    ended = await trainings.cancel(run)
    return json_response(asdict(ended), 200 if ended.over else 202)


@router.post("/v1/runs/{id}/resume", status_code=202)
async def resume_run(trainings: Trainings, run: Run) -> Response:
    """Go on with a run that failed or was cancelled, from its last checkpoint."""
    return json_response(asdict(await trainings.restart(run)), 202)


@router.get("/v1/runs/{id}/events")
async def run_events(core: Core, trainings: Trainings, run: Run, key: Caller, request: Request) -> Response:
    """Follow by server-sent events: `stage`, `step` with its metrics, `warning`, `finished`."""

    async def look() -> Ending:
        return (await trainings.get(run.id, key)).ending

    return follow(core, run.topic, request, run.ending, look)


@router.get("/v1/runs/{id}/metrics")
async def run_metrics(
    core: Core, trainings: Trainings, run: Run, after: Annotated[int, Query(ge=-1, description="Steps behind this one")] = -1
) -> Response:
    """Metrics by step."""
    file = trainings.made.files(run).get(METRICS)
    text = await asyncio.to_thread(file.read_text) if file is not None else ""
    rows = {row["step"]: row for line in text.splitlines() if line.endswith("}") for row in [json.loads(line)]}
    return json_response({"metrics": [row for step, row in sorted(rows.items()) if step > after]})


@router.post("/v1/runs/{id}/evaluate")
async def evaluate(trainings: Trainings, run: Run, key: Caller, body: EvaluateBody) -> Response:
    """Play a split greedily with the trained model."""
    request = ModelRequest(do="evaluate", split=body.split, limit=body.limit)
    return json_response(await trainings.made.ask(run, request, key))


@router.post("/v1/runs/{id}/generate")
async def generate(trainings: Trainings, run: Run, key: Caller, body: GenerateBody) -> Response:
    """Ask the trained model; answers an assistant's message."""
    sampling = body.sampling.model_dump(exclude_none=True)
    request = ModelRequest(do="generate", messages=body.messages, sampling=sampling)
    return json_response(await trainings.made.ask(run, request, key))


@router.get("/v1/runs/{id}/files")
async def files(trainings: Trainings, run: Run) -> Response:
    """What the run has made: metrics, plot, timeline, and the trained model as a Hugging Face folder."""
    found = trainings.made.files(run)
    return json_response({"files": [{"name": name, "size": path.stat().st_size} for name, path in found.items()]})


@router.get("/v1/runs/{id}/files/{name:path}")
async def file(trainings: Trainings, run: Run, name: Annotated[str, Path(max_length=300)]) -> Response:
    """One of these files."""
    path = trainings.made.files(run).get(name)
    if path is None:
        raise unknown("file", name)
    return FileResponse(path, media_type="application/octet-stream", headers={"X-Content-Type-Options": "nosniff"})


@router.websocket("/v1/relay")
async def relay(socket: WebSocket) -> None:
    """Pass an environment that this service plays on to the processes of runs, and to other workers."""
    trainings: TrainingHub = socket.app.state.trainings
    secret = bearer(socket)
    env = trainings.relayed(secret) or trainings.core.envs.others.relayed(secret)
    if env is None:
        await socket.close(UNAUTHORISED, "no such run")
        return
    await socket.accept()
    await Relay(lambda: trainings.core.envs.link(env), env, socket).serve()
