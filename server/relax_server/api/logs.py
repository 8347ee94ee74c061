"""What the service writes to stderr: lines for people, or one JSON object a line; and a line for each request."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relax_sdk.printable import printable
from relax_server.log_ids import current_ids

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
FORMATS, LEVELS = get_args(LogFormat), get_args(LogLevel)
LIBRARIES = (
    *("PIL", "aiohttp", "alembic", "asyncio", "datasets", "filelock", "fsspec", "httpcore", "httpx", "matplotlib"),
    *("sqlalchemy", "sse_starlette", "transformers", "urllib3", "uvicorn", "websockets"),
)
"""Only their warnings are shown."""
LIFE = "relax_server.life"
"""The logger of lines about the service's own life, which are shown at every level."""
FIELDS = "fields"
"""The attribute of a record that holds what a line says besides its message."""

_life, _requests = logging.getLogger(LIFE), logging.getLogger("relax_server.requests")


def say(text: str, **fields: Any) -> None:
    """Tell people about the service itself."""
    _life.info(text, extra={FIELDS: fields})


def log_to_stderr(form: LogFormat, level: LogLevel, worker: int | None = None) -> None:
    """Let all loggers of this process write to stderr, in one form.

    Args:
        form: text or JSON.
        level: the least that is written.
        worker: number of this process, which its lines name; None: the service has but one.
    """
    handler, least = logging.StreamHandler(sys.stderr), logging.getLevelNamesMapping()[level.upper()]
    handler.setFormatter((JsonLines if form == "json" else TextLines)(worker))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(least)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(max(least, logging.WARNING))
    _life.setLevel(logging.INFO)
    logging.captureWarnings(True)
    _join_transformers()


def _join_transformers() -> None:
    """It has a handler of its own, whose lines would be in another form."""
    from transformers.utils import logging as theirs

    theirs.disable_default_handler()
    theirs.enable_propagation()


def _more(record: logging.LogRecord, worker: int | None) -> dict[str, Any]:
    own = {} if worker is None else {"worker": worker}
    return {**own, **current_ids(), **getattr(record, FIELDS, {})}


class JsonLines(logging.Formatter):
    """One JSON object a line: `time` (UTC, ISO 8601), `level`, `logger`, `message`, ids, more fields, `exception`.

    Args:
        worker: see `log_to_stderr`.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        row |= {name: value for name, value in _more(record, self._worker).items() if name not in row}
        if record.exc_info:
            row["exception"] = self.formatException(record.exc_info)
        return json.dumps(row, default=str)


class TextLines(logging.Formatter):
    """Time, level, message, and then ids and fields as `name=value`.

    Args:
        worker: see `log_to_stderr`.
    """

    def __init__(self, worker: int | None = None) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))  # a line may quote what a stranger wrote

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.name == LIFE:
            return f"relax serve{'' if self._worker is None else f' (worker {self._worker})'}: {record.message}"
        more = [f"{name}={_brief(value)}" for name, value in _more(record, self._worker).items()]
        return " ".join([super().formatMessage(record), *more])


def _brief(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if any(c.isspace() or c in '"=' for c in text) or not text.isprintable() else text


class RequestLog:
    """Writes a line for each request, at level info: method, path as it was sent, status, milliseconds, and ids.

    Neither what follows the path nor headers are written, so no key is.

    Args:
        app: the application around which it is.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not _requests.isEnabledFor(logging.INFO):
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), None

        async def watched(message: Message) -> None:
            nonlocal status
            status = status or _status(message)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except Exception:
            status = status or 500
            raise
        finally:
            fields: Mapping[str, Any] = {
                "method": scope.get("method", "WEBSOCKET"),
                "path": (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "backslashreplace"),
                "status": status,
                "ms": round(1e3 * (time.perf_counter() - began), 1),
            }
            _requests.info("request", extra={FIELDS: fields})


def _status(message: Message) -> int | None:
    """The status that a message begins an answer with; None: it does not begin one."""
    match message["type"]:
        case "http.response.start" | "websocket.http.response.start":
            return message["status"]
        case "websocket.accept":
            return 101
        case "websocket.close":
            return 403
    return None
