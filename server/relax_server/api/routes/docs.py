"""`/docs`: the routes to read and try in a browser; everything that the page loads comes from this service."""

from __future__ import annotations

from importlib.resources import files
from typing import Literal

from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse, Response

router = APIRouter(include_in_schema=False)

PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Relax Gym: routes</title><link rel="stylesheet" href="docs/swagger-ui.css"></head>
<body><div id="routes"></div><script src="docs/swagger-ui-bundle.js"></script><script src="docs/start.js"></script></body>
</html>
"""
START = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#routes", deepLinking: true, validatorUrl: null});\n'


@router.get("/docs")
async def docs() -> Response:
    """The page."""
    return HTMLResponse(PAGE)


@router.get("/docs/start.js")
async def start() -> Response:
    """What the page does first; no script stands in the page itself, as the service's content policy forbids those."""
    return Response(START, media_type="text/javascript")


@router.get("/docs/{name}")
async def asset(name: Literal["swagger-ui.css", "swagger-ui-bundle.js"]) -> Response:
    """Swagger UI, as the package `fastapi-offline` holds it."""
    return FileResponse(str(files("fastapi_offline") / "static" / name))
