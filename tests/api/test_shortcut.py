"""Routes that are tried before the application: what they answer when their endpoint does not."""

import asyncio
from typing import Any

from relax_server.api.door.front import Shortcut
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route


def asked(path: str, method: str = "POST", raised: Exception | None = None) -> tuple[list[dict[str, Any]], list[Exception]]:
    """What was sent for one request, and the errors that an endpoint raised."""
    sent: list[dict[str, Any]] = []
    errors: list[Exception] = []

    async def endpoint(request: Request) -> Response:
        if raised is not None:
            raise raised
        return PlainTextResponse(request.path_params["id"])

    async def failed(_: Request, error: Exception) -> Response:
        errors.append(error)
        return PlainTextResponse("failed", 500)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("the application", 404)(scope, receive, send)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b"", "root_path": ""}
    asyncio.run(Shortcut(app, [Route("/calls/{id}", endpoint, methods=["POST"])], failed)(scope, receive, send))
    return sent, errors


def test_a_shortcut_answers_its_own_path_and_method_and_leaves_the_rest_to_the_application():
    assert asked("/calls/7")[0][1]["body"] == b"7"
    assert asked("/calls/7", "PUT")[0][1]["body"] == asked("/other")[0][1]["body"] == b"the application"


def test_an_endpoint_that_fails_is_answered_and_one_whose_client_went_away_is_not():
    error = ValueError("a bug")
    sent, errors = asked("/calls/7", raised=error)
    assert sent[0]["status"] == 500 and errors == [error]
    assert asked("/calls/7", raised=ClientDisconnect()) == ([], [])
