"""What schemathesis is told about the service: keys, a session that is open, and how errors look. It loads this file itself.

`FUZZ_RUN_KEY` and `FUZZ_ADMIN_KEY` are keys of the service; the second one is used for keys, and for pausing, after which the
service goes on at once.
"""

from __future__ import annotations

import os
import random
from typing import Any

import requests
import schemathesis
from relax_server.api.schemas import LEAST_SECONDS

PAUSING = ("/v1/pause", "/v1/resume")
_chance = random.Random(1)
LIMIT = 20.0
"""Seconds."""
MOST = {"n": 2, "group_size": 2, "max_new_tokens": 4}
"""What a rollout may ask for, so that it is soon over."""
SECONDS = 10.0
"""A valid time limit is no shorter here: what takes longer than its caller allows is answered 504, as it should be."""
_session: dict[str, str] = {}
_rollout: dict[str, str] = {}
_ended: list[str] = []
"""A session that has ended, whose events end too."""


def renew(url: str) -> None:
    """Open a session in place of one that is over."""
    headers = {"Authorization": f"Bearer {os.environ['FUZZ_RUN_KEY']}"}
    body = {"env": "tone-v0", "sampling": {"max_new_tokens": 4}}
    answer = requests.post(f"{url}/v1/sessions", json=body, headers=headers, timeout=LIMIT)
    assert answer.status_code == 201, answer.text
    _session["id"] = answer.json()["id"]


def allow_time(body: Any) -> None:
    """Lengthen the time limits of a session or a rollout that could be kept by nobody on a machine at work."""
    limits = body.get("limits") if isinstance(body, dict) else None
    for name, seconds in limits.items() if isinstance(limits, dict) else ():
        if name.endswith("_timeout") and type(seconds) in (int, float) and LEAST_SECONDS <= seconds < SECONDS:
            limits[name] = SECONDS


@schemathesis.hook
def before_call(context: Any, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    path = case.operation.path
    key = os.environ["FUZZ_ADMIN_KEY" if path.startswith("/v1/keys") or path in PAUSING else "FUZZ_RUN_KEY"]
    case.headers["Authorization"] = f"Bearer {key}"
    allow_time(case.body)
    if path.endswith("/events"):  # those of something open would not end
        known = _ended[-1] if _ended and "sessions" in path and _chance.random() < 0.5 else "unknown"
        case.path_parameters["id"] = known
    elif path.startswith("/v1/sessions/{id}"):
        if not _session:
            renew(case.operation.base_url.rstrip("/"))
        case.path_parameters["id"] = _session["id"]
    elif path.startswith("/v1/rollouts/{id}") and _rollout:
        case.path_parameters["id"] = _rollout["id"]
    elif path == "/v1/rollouts" and isinstance(case.body, dict):
        if isinstance(case.body.get("env"), str) and case.body["env"]:
            case.body["env"] = "tone-v0"
            case.body.setdefault("n", 1)
        for body in (case.body, case.body.get("sampling")):
            for name, most in MOST.items():
                if isinstance(body, dict) and type(body.get(name)) is int and body[name] > most:
                    body[name] = most


@schemathesis.hook
def after_call(context: Any, case: schemathesis.Case, response: Any) -> None:
    path = case.operation.path
    ended = response.status_code < 400 and (path.endswith("/finish") or case.method.upper() == "DELETE")
    if path.startswith("/v1/sessions/{id}") and (ended or b'"episode_over"' in response.content):
        if ended:  # an episode that is over waits for its end: its events go on
            _ended[:] = [_session.get("id", "unknown")]
        _session.clear()
    if path == "/v1/pause":
        headers = {"Authorization": f"Bearer {os.environ['FUZZ_ADMIN_KEY']}"}
        url = case.operation.base_url.rstrip("/")
        assert requests.post(f"{url}/v1/resume", headers=headers, timeout=LIMIT).status_code == 200
    if path == "/v1/rollouts" and case.method.upper() == "POST" and response.status_code < 300:
        _rollout["id"] = response.json()["id"]


@schemathesis.check
def errors_have_openai_s_shape(ctx: Any, response: Any, case: schemathesis.Case) -> None:
    if response.status_code < 400 or case.method.upper() == "HEAD":
        return
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"] and error["type"] and error["code"], error
