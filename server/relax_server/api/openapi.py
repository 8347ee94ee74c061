"""What the published OpenAPI says of the routes that are plain Starlette ones: the model calls."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_ERROR = {
    "description": "Refused, or failed; in OpenAI's shape",
    "content": {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "object"}}}}},
}
_SESSION = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}, "description": "Of the session"}


def _call(summary: str, required: str, form: dict[str, Any], with_id: bool) -> dict[str, Any]:
    fields = {required: form, "model": {"type": "string"}, "stream": {"type": "boolean"}}
    schema = {"type": "object", "required": [required], "properties": fields, "additionalProperties": True}
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    body: dict[str, Any] = {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"200": {"description": "The answer, whole or streamed", "content": answer}, "4XX": _ERROR, "5XX": _ERROR},
    }
    return {"post": body | ({"parameters": [_SESSION]} if with_id else {})}


def describe(app: FastAPI) -> None:
    """Let the application's description hold the model calls too."""
    original = app.openapi
    messages = {"type": "array", "items": {"type": "object"}, "minItems": 1}
    items = {"anyOf": [{"type": "string"}, messages]}

    def openapi() -> dict[str, Any]:
        schema = original()
        for base, with_id in (("/v1/sessions/{id}/openai/v1", True), ("/v1/openai/v1", False)):
            schema["paths"][f"{base}/chat/completions"] = _call(
                "A model call, as chat completions", "messages", messages, with_id
            )
            schema["paths"][f"{base}/responses"] = _call("A model call, as a response", "input", items, with_id)
        schema["paths"]["/v1/chat/completions"] = _call(
            "A model call, recorded as a session of its own", "messages", messages, False
        )
        return schema

    app.openapi = openapi
