"""Who is calling, and what they may do."""

from __future__ import annotations

import contextlib

from starlette.requests import HTTPConnection

from relax_server.api.core import ServiceCore
from relax_server.api.external_session import AnySession, ExternalSession, still_open
from relax_server.api.keys import LOCAL, Key, Right
from relax_server.api.sessions import SECRET, UNKNOWN, SessionHub
from relax_server.gateway.errors import ApiError, unknown
from relax_server.gateway.wire import bearer
from relax_server.log_ids import add_ids


async def caller(request: HTTPConnection, core: ServiceCore, right: Right = "run") -> Key:
    """The key of a request, whose id is kept with the request: see `watched`.

    Raises:
        ApiError: no key, one that does not work, or one without the right.
    """
    key = await _key(bearer(request), core)
    add_ids(key=key.id)
    request.state.key_id = key.id
    if not key.may(right):
        raise ApiError(403, f"key {key.name!r} has no right to {right}; it has {', '.join(sorted(key.rights))}", "forbidden")
    return key


async def known_caller(request: HTTPConnection, core: ServiceCore, hub: SessionHub) -> None:
    """Raise if a request shows neither a key that works nor the key of a session, where one is wanted.

    Raises:
        ApiError: 401.
    """
    secret = bearer(request)
    if hub.by_secret(secret) is None:
        await _key(secret, core)


async def _key(secret: str, core: ServiceCore) -> Key:
    """The key of a secret, or that of anybody on this machine while there are no keys.

    Raises:
        ApiError: 401, a key is wanted, and this is none that works.
    """
    key = core.keys.known(secret) if secret else None
    if key is not None:
        return key
    locked = await core.wants_keys()
    if secret and (locked or core.config.no_keys):
        async with core.strangers if core.keys.seen(secret) is None else contextlib.nullcontext():
            key = await core.ask(core.keys.find, secret)
    if key is None and locked:
        raise ApiError(401, _wrong(secret), "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    return key or LOCAL


def _wrong(secret: str) -> str:
    if not secret:
        return "this service wants a key: send `Authorization: Bearer <key>`"
    if secret.startswith(SECRET):
        return f"no session has this key{UNKNOWN}"
    return "this key is unknown, revoked or expired"


def watched(request: HTTPConnection) -> str | None:
    """Id of the key that lets a request in for as long as it works; None: it needs none."""
    return getattr(request.state, "key_id", None)


def _enter(request: HTTPConnection, hub: SessionHub, session: AnySession) -> AnySession:
    """Let a session's own key in, as long as the key that opened the session works.

    Raises:
        ApiError: it does not.
    """
    why = hub.ended_keys.get(session.key.id)
    if why is not None:
        raise ApiError(401, f"session {session.id} is over: {why}", "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    add_ids(key=session.key.id, **session.log_ids)
    if session.key is not LOCAL:
        request.state.key_id = session.key.id
    return session


async def session_of(request: HTTPConnection, core: ServiceCore, hub: SessionHub, id: str) -> AnySession:
    """The session in a request's path, for its own key or its owner's.

    Raises:
        ApiError: unknown, or not the caller's, which is told in the same words.
    """
    session, secret = hub.get(id), bearer(request)
    if session.opens_with(secret):
        return _enter(request, hub, session)
    key = await caller(request, core)
    if key.id != session.key.id and not key.may("admin"):
        raise unknown("session", id, UNKNOWN)
    add_ids(**session.log_ids)
    return session


async def session_called(request: HTTPConnection, core: ServiceCore, hub: SessionHub) -> ExternalSession:
    """The session in a request's path, or else the one that its key belongs to.

    Raises:
        ApiError: there is none, or it is over.
    """
    id = request.path_params.get("id")
    if id is not None:
        return still_open(await session_of(request, core, hub, id))
    session = hub.by_secret(bearer(request))
    if session is None:
        raise ApiError(401, "the key of a session is wanted here; open one with POST /v1/sessions", "invalid_api_key")
    return still_open(_enter(request, hub, session))
