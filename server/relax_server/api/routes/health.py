"""Whether the service answers, can play, and with what."""

from __future__ import annotations

import contextlib
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from relax_sdk.errors import RelaxError
from relax_server.api.core import ServiceCore
from relax_server.api.dependencies import Caller, Core, Ready
from relax_server.gateway.wire import json_response

router = APIRouter()


@router.get("/healthz")
@router.get("/v1/healthz")
async def healthz(core: Core) -> Response:
    """Say that the process answers, and whether it is `ok`, `paused` or `draining`."""
    return json_response({"status": core.status})


@router.get("/readyz")
@router.get("/v1/readyz")
async def readyz(readiness: Ready) -> Response:
    """Whether episodes can be begun: an engine and the database answer, and the service is neither paused nor shut down."""
    ready, why = await readiness.look()
    return json_response({"ready": ready, "reason": why}, 200 if ready else 503)


@router.get("/metrics")
@router.get("/v1/metrics")
async def metrics(core: Core) -> Response:
    """Counters and gauges for Prometheus; with several workers those of all, each with the label `worker`."""
    return Response(await core.measured(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/models")
async def models(core: Core, key: Caller) -> Response:
    """The model, its engines and their weight versions."""
    return json_response(await _models(core))


async def _models(core: ServiceCore) -> dict[str, Any]:
    engines = []
    for engine, stats in zip(core.pool.engines, core.pool.stats(), strict=True):
        version = None
        if stats["up"]:
            with contextlib.suppress(RelaxError, TimeoutError):
                version = (await engine.model_info()).get("weight_version")
        engines.append(stats | {"weight_version": version})
    model = {"id": core.config.model, "object": "model", "owned_by": "relax", "modalities": sorted(core.processor.modalities)}
    return {"object": "list", "data": [model], "engines": engines}
