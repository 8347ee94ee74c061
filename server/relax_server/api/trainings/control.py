"""The engines of a training run, asked of its process: its control answers on this machine, to whoever can read its folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from relax_sdk.control import read_control
from relax_sdk.errors import RunError
from relax_server.gateway.errors import ApiError

ANSWER_SECONDS = 20.0


async def ask_control(folder: Path, method: str, id: str = "", *, body: Any = None, **query: Any) -> tuple[int, Any]:
    """Pass a request on.

    Args:
        folder: of the run.
        method: of HTTP.
        id: of an engine; empty: all.
        body: to send, as JSON.
        **query: parameters; None is left out.

    Returns:
        Status and body of the answer, if it is none of refusal.

    Raises:
        ApiError: the run is not going on, does not answer, or refuses.
    """
    try:
        control = await asyncio.to_thread(read_control, folder)
    except RunError as error:
        raise ApiError(409, "the run is not under way, so it has no engines now", "not_running") from error
    url = f"{control['url']}/v1/engines" + (f"/{quote(id, safe='')}" if id else "")
    headers, limit = {"Authorization": f"Bearer {control['key']}"}, aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    params = {name: str(value) for name, value in query.items() if value is not None}
    try:
        async with (
            aiohttp.ClientSession(headers=headers, timeout=limit) as session,
            session.request(method, url, json=body, params=params) as response,
        ):
            status, answer = response.status, await response.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        what = f"the process of the run does not answer ({error or type(error).__name__})"
        raise ApiError(503, what, "not_answering", headers={"Retry-After": "1"}) from error
    if status >= 400:
        raise ApiError(status, answer["error"]["message"], answer["error"]["code"])
    return status, answer
