"""Requests to a rollout service and what their answers mean, without doing any."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relax_sdk.config import SamplingParams
from relax_sdk.errors import ServiceError, ServiceUnavailable
from relax_sdk.evaluation import Evaluation
from relax_sdk.media import MediaRef
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.trajectory import Status, Trajectory, Turn, VersionSpan

if TYPE_CHECKING:
    import httpx

URL = "http://127.0.0.1:8000"
ATTEMPTS, LONGEST_PAUSE = 8, 8.0
"""Tries of a request that is safe to repeat, enough for a service that is started again; seconds between two at most."""
CANCEL_LOOKS, CANCEL_PAUSE = 240, 0.5
"""Looks at a run that was told to end, and seconds between two."""
STREAM_TIMEOUT = 60.0
"""Seconds of silence after which an event stream is opened again; the service gives a sign of life every 15."""
AGAIN = frozenset({429, 502, 503, 504})
"""Answers after which a request is repeated, if that is safe."""
REFUSED = frozenset({429, 503})
"""Answers that say nothing was done, so that any request may be repeated."""


@dataclass(frozen=True)
class Event:
    """Something that happened to a rollout or a session."""

    id: int
    """Rises; a stream can be resumed behind it."""
    kind: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Step:
    """The environment's answer to an action."""

    observation: list[dict[str, Any]]
    """New OpenAI messages."""
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @property
    def done(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.truncated


@dataclass(frozen=True)
class Finished:
    """The end of a session, whose trajectory is durable."""

    trajectory_id: str
    status: str
    reward: float
    rewards: dict[str, float]
    error: str | None = None


@dataclass(frozen=True)
class RolloutState:
    """State and counts of a rollout."""

    id: str
    state: str
    """`queued`, `running`, `paused`, `completed`, `failed` or `cancelled`."""
    counts: dict[str, int]
    error: str | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state not in ("queued", "running", "paused")


@dataclass(frozen=True)
class RunState:
    """State and step of a training run."""

    id: str
    state: str
    """`queued`, `waiting` (for the host of its environment), `running`, `completed`, `failed` or `cancelled`."""
    step: int
    """The last one that is done."""
    error: str | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.state not in ("queued", "waiting", "running")


@dataclass(frozen=True)
class Call:
    """One request."""

    method: str
    path: str
    json: Any = None
    content: bytes | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    safe: bool = True
    """Doing it twice is the same as doing it once."""
    raw: bool = False
    """The answer is bytes, not JSON."""


# ------------------------------------------------------------------------------------------- requests, and their answers


def submit_call(env: str, settings: dict[str, Any], idempotency_key: str | None) -> Call:
    key = idempotency_key or uuid.uuid4().hex
    return Call("POST", "/v1/rollouts", {"env": env} | settings, headers={"Idempotency-Key": key})


def read_rollout(body: Mapping[str, Any]) -> RolloutState:
    return RolloutState(body["id"], body["state"], body["counts"], body["error"])


def run_call(env: str, config: Mapping[str, Any], agent: Sequence[str] | None, idempotency_key: str | None) -> Call:
    body = {"env": env, "config": dict(config)} | ({"agent": list(agent)} if agent is not None else {})
    return Call("POST", "/v1/runs", body, headers={"Idempotency-Key": idempotency_key or uuid.uuid4().hex})


def read_run(body: Mapping[str, Any]) -> RunState:
    return RunState(body["id"], body["state"], body["step"], body["error"])


def not_ended(run: RunState) -> ServiceUnavailable:
    return ServiceUnavailable(f"run {run.id} was told to end and is still {run.state} after 2 minutes; look at it later", 0, "")


def generate_call(run: str, messages: Sequence[Any], sampling: SamplingParams | None) -> Call:
    body: dict[str, Any] = {"messages": [_wire(message) for message in messages]}
    if sampling is not None:
        fields = ("max_new_tokens", "temperature", "top_p", "top_k", "ignore_eos", "sampling_seed")
        given = {name: getattr(sampling, name) for name in fields}
        given |= {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids)}
        body["sampling"] = {name: value for name, value in given.items() if value is not None}
    return Call("POST", f"/v1/runs/{run}/generate", body)


def read_assistant(body: Mapping[str, Any]) -> AssistantMessage:
    message = Message.from_openai(body)
    assert isinstance(message, AssistantMessage)
    return message


def read_evaluation(body: Mapping[str, Any]) -> Evaluation:
    return Evaluation(**{**body, "ci95": float("nan") if body["ci95"] is None else body["ci95"]})  # of a single episode


def open_call(env: str, settings: dict[str, Any]) -> Call:
    return Call("POST", "/v1/sessions", {"env": env} | settings, safe=False)


def chat_call(session: str, messages: Sequence[Any], settings: dict[str, Any]) -> Call:
    body = {"messages": [_wire(message) for message in messages], "model": "policy"} | settings
    return Call("POST", f"/v1/sessions/{session}/openai/v1/chat/completions", body, safe=False)


def _wire(message: Any) -> Any:
    return message.to_openai(lambda part: part.data_uri()) if isinstance(message, Message) else message


def read_message(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body["choices"][0]["message"].items() if value is not None}


def step_call(session: str, action: Any) -> Call:
    if isinstance(action, str):
        action = {"content": action}
    return Call("POST", f"/v1/sessions/{session}/step", {"action": _wire(action)}, safe=False)


def reward_call(session: str, value: float, name: str) -> Call:
    return Call("POST", f"/v1/sessions/{session}/reward", {"name": name, "value": value})


def read_trajectory(body: Mapping[str, Any]) -> Trajectory:
    turns = [
        Turn(
            **{name: value for name, value in turn.items() if name not in ("media", "weight_versions", "sampling")},
            media=[MediaRef(**ref) for ref in turn["media"]],
            weight_versions=[VersionSpan(**span) for span in turn["weight_versions"]],
            sampling=SamplingParams(**turn["sampling"]) if turn.get("sampling") else None,
        )
        for turn in body["turns"]
    ]
    return Trajectory(**{**body, "turns": turns, "status": Status(body["status"])})


def read_event(line_event: Any) -> Event:
    return Event(int(line_event.id), line_event.event, line_event.json())


def failed(response: httpx.Response) -> ServiceError:
    """The error in a response."""
    try:
        error = response.json()["error"]
        message, code = error["message"], error["code"]
    except (ValueError, LookupError, TypeError):
        message, code = response.text[:300] or response.reason_phrase, "http_error"
    kind = ServiceUnavailable if response.status_code in AGAIN else ServiceError
    return kind(f"{response.request.method} {response.request.url.path}: {message}", response.status_code, code)


def at_limit(error: BaseException | None) -> bool:
    """Whether an error says that the episode's limit on turns or tokens is reached; any OpenAI client's error has the code."""
    return getattr(error, "code", None) == "episode_over"


def unreachable(url: str, error: Exception) -> ServiceUnavailable:
    why = str(error) or type(error).__name__
    return ServiceUnavailable(f"the rollout service at {url} cannot be reached ({why}); start it with `relax serve`", 0, "")


def pause(attempt: int, response: httpx.Response | None = None) -> float:
    """Seconds before the next try: doubled each time, or what the service asks for."""
    asked = response.headers.get("retry-after", "") if response is not None else ""
    return min(float(asked) if asked.isdigit() else 0.1 * 2**attempt, LONGEST_PAUSE)


def may_repeat(call: Call, attempt: int, response: httpx.Response | None) -> bool:
    if attempt + 1 >= ATTEMPTS:
        return False
    if response is None:
        return call.safe
    return response.status_code in (AGAIN if call.safe else REFUSED)


class Settings:
    """What both clients are made with."""

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.verify = self.url.startswith("https:")
        """Reading the certificates takes a tenth of a second, and is for nothing where nothing is encrypted."""


class SessionFields:
    """What is known of an open session."""

    def __init__(self, opened: Mapping[str, Any]) -> None:
        self.id: str = opened["id"]
        self.key: str = opened["key"]
        """The key of this session alone, which an agent is given."""
        self.base_url: str = opened["base_url"]
        """For any OpenAI client."""
        self.observation: list[dict[str, Any]] = opened["observation"]
        """The first one, OpenAI messages."""
        self.tools: list[dict[str, Any]] = opened["tools"]
        self.seed: int = opened["seed"]
        self.trajectory_id: str = opened["trajectory_id"]
        self.finished: Finished | None = None
        self._turns = 0
