"""What clients are told when something is wrong: one JSON shape, OpenAI's, on every route."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from relax_sdk.errors import (
    ConfigError,
    EngineAborted,
    EngineError,
    EngineUnavailable,
    EnvError,
    EpisodeError,
    EpisodeOver,
    EpisodeTimeout,
    JournalError,
    MediaError,
    RegistryError,
    RelaxError,
    RewardError,
    ServiceError,
    StorageError,
    TokenError,
    UnstorableError,
)

logger = logging.getLogger(__name__)


class ApiError(RelaxError):
    """A request that is answered with an error.

    Args:
        status: HTTP status.
        message: what was wrong, where, and what to do.
        code: for programs.
        param: the field of the request that is to blame.
        headers: to send along.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.headers = status, code, param, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer, as OpenAI clients expect it."""
        return {"error": {"message": str(self), "type": _kind(self.status), "param": self.param, "code": self.code}}


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


_STATUS: tuple[tuple[type[RelaxError], int, str], ...] = (
    (EpisodeOver, 400, "episode_over"),
    (EpisodeTimeout, 504, "timeout"),
    (EngineAborted, 503, "aborted"),
    (EngineUnavailable, 503, "engine_unavailable"),
    (EngineError, 502, "engine_error"),
    (UnstorableError, 400, "unstorable_value"),
    (JournalError, 503, "journal_unavailable"),
    (StorageError, 503, "storage_unavailable"),
    (RegistryError, 404, "unknown_name"),
    (MediaError, 400, "invalid_media"),
    (TokenError, 400, "invalid_prompt"),
    (ConfigError, 400, "invalid_value"),
    (EnvError, 502, "environment_error"),
    (RewardError, 502, "reward_error"),
    (EpisodeError, 400, "episode_error"),
)
"""The first that fits. 502 and 504 are faults behind the service: of an engine or of an environment."""

_HIDDEN = {
    "journal_unavailable": "the journal cannot be read or written at the moment; what was reported as done is safe; try again",
    "storage_unavailable": "media cannot be stored at the moment; what was reported as stored is safe; try again",
}
"""What is told instead of errors that name files, addresses or users of databases."""


def as_api_error(error: RelaxError) -> ApiError:
    """What a client is told of an error of ours; where the service keeps its data is for its log alone."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServiceError) and error.status:
        return ApiError(error.status, str(error), error.code, headers={"Retry-After": str(math.ceil(error.retry_after))})
    message, param = str(error), error.field or None if isinstance(error, UnstorableError) else None
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            if code in _HIDDEN:
                logger.warning("%s", error)
                message = _HIDDEN[code]
            headers = {"Retry-After": "1"} if status == 503 else None
            return ApiError(status, message, code, param, headers)
    return ApiError(500, message, "internal_error")


def bad(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that cannot be carried out as it is."""
    return ApiError(400, message, code, param)


def invalid(errors: Sequence[Any]) -> ApiError:
    """A request whose body pydantic refuses, with the first of its reasons."""
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    return bad(f"{place or 'body'}: {first['msg']}", place or None, "invalid_request")


def unknown(what: str, id: str, why: str = "") -> ApiError:
    """Something that is not there, or not this caller's."""
    return ApiError(404, f"no {what} {id!r}{why}", f"{what}_not_found")
