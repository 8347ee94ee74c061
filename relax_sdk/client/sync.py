"""`Client`: a rollout service, call by call."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from relax_sdk.client.calls import (
    ATTEMPTS,
    CANCEL_LOOKS,
    CANCEL_PAUSE,
    STREAM_TIMEOUT,
    URL,
    Call,
    Event,
    Finished,
    RolloutState,
    RunState,
    SessionFields,
    Settings,
    Step,
    at_limit,
    chat_call,
    failed,
    generate_call,
    may_repeat,
    not_ended,
    open_call,
    pause,
    read_assistant,
    read_evaluation,
    read_event,
    read_message,
    read_rollout,
    read_run,
    read_trajectory,
    reward_call,
    run_call,
    step_call,
    submit_call,
    unreachable,
)
from relax_sdk.client.upload import uploadable
from relax_sdk.config import SamplingParams
from relax_sdk.env import Env
from relax_sdk.errors import ConfigError, ServiceError, ServiceUnavailable
from relax_sdk.evaluation import Evaluation
from relax_sdk.media import Media, MediaRef
from relax_sdk.messages import AssistantMessage
from relax_sdk.registry import EnvSpec
from relax_sdk.trajectory import Trajectory

if TYPE_CHECKING:
    import httpx


class Client(Settings):
    """A rollout service.

    What is safe to repeat is repeated, with growing pauses, when the service cannot be reached or is busy; an event stream
    goes on where it broke off. Every method raises `ServiceError` when the service refuses, `ServiceUnavailable` when it
    cannot be reached in the end.

    Args:
        url: of the service.
        key: for services that want one.
        timeout: seconds for one request.
    """

    def __init__(self, url: str = URL, key: str | None = None, *, timeout: float = 600.0) -> None:
        import httpx

        super().__init__(url, key, timeout)
        self._http = httpx.Client(base_url=self.url, headers=self.headers, timeout=timeout, verify=self.verify)

    def envs(self) -> list[dict[str, Any]]:
        """The environments that can be played."""
        return self._send(Call("GET", "/v1/envs"))["envs"]

    def models(self) -> dict[str, Any]:
        """The model, its engines and their weight versions."""
        return self._send(Call("GET", "/v1/models"))

    def register_env(self, id: str, **source: Any) -> dict[str, Any]:
        """Register an environment of a package that is installed there; takes a key with the right to upload.

        Args:
            id: its name there.
            **source: `entry="package.module:Class"` and perhaps `tasks="package.module:function"`; or `package="name"`, a
                distribution that registers it.

        Returns:
            What the service knows of it.
        """
        return self._send(Call("POST", "/v1/envs", {"id": id} | source))

    def upload_env(self, env: str | type[Env] | EnvSpec, id: str | None = None) -> dict[str, Any]:
        """Send an environment's code there, where it runs in a worker process; takes a key with the right to upload.

        Args:
            env: a registered name, a class, or a spec.
            id: its name there; default: its own.

        Raises:
            ConfigError: it cannot be pickled.
        """
        return self._send(Call("POST", "/v1/envs", uploadable(env, id)))

    def remove_env(self, id: str) -> None:
        """Forget an environment that was registered or uploaded."""
        self._send(Call("DELETE", f"/v1/envs/{quote(id)}"))

    def rollout(self, env: str, *, idempotency_key: str | None = None, **settings: Any) -> Rollout:
        """Let the service play groups of episodes.

        Args:
            env: registered there.
            idempotency_key: the same key gives the same rollout; default: a new one, kept over repetitions of this call.
            **settings: `n` or `tasks`, `group_size`, `split`, `seed`, `sampling`, `limits`, `run`, `on_failure`.
        """
        return Rollout(self, read_rollout(self._send(submit_call(env, settings, idempotency_key))))

    def get_rollout(self, id: str) -> Rollout:
        """A rollout that was submitted before."""
        return Rollout(self, read_rollout(self._send(Call("GET", f"/v1/rollouts/{id}"))))

    def run(
        self, env: str, *, config: Mapping[str, Any], agent: Sequence[str] | None = None, idempotency_key: str | None = None
    ) -> RemoteRun:
        """Submit a training run; `Trainer(..., server=url).fit()` does this, and follows it.

        Args:
            env: known there.
            config: fields of `RunConfig`.
            agent: a command that plays the episodes; takes a key with the right to upload.
            idempotency_key: the same one gives the same run; default: a new one.
        """
        return RemoteRun(self, read_run(self._send(run_call(env, config, agent, idempotency_key))))

    def get_run(self, id: str) -> RemoteRun:
        """A training run that was submitted before."""
        return RemoteRun(self, read_run(self._send(Call("GET", f"/v1/runs/{id}"))))

    def runs(self) -> list[RunState]:
        """The caller's training runs, newest first."""
        return [read_run(row) for row in self._send(Call("GET", "/v1/runs"))["runs"]]

    def session(self, env: str = "none", **settings: Any) -> RemoteSession:
        """Open an episode that is played from here; a context manager.

        Args:
            env: registered there; `none`: the world is the agent's own.
            **settings: `split`, `task_index`, `seed`, `sample_index`, `mode`, `sampling`, `limits`, `media`, `metadata`.
        """
        return RemoteSession(self, self._send(open_call(env, settings)))

    def trajectory(self, id: str) -> Trajectory:
        """A trajectory with all its tokens."""
        return read_trajectory(self._send(Call("GET", f"/v1/trajectories/{id}")))

    def media(self, sha256: str) -> bytes:
        """The bytes of a media item."""
        return self._send(Call("GET", f"/v1/media/{sha256}", raw=True))

    def put_media(self, media: Media) -> MediaRef:
        """Store a media item there; messages can then name it as `relax-media:<sha256>`."""
        return MediaRef(**self._send(Call("POST", f"/v1/media/{media.kind}", content=media.bytes())))

    def status(self) -> str:
        """`ok`, `paused` or `draining`."""
        return self._send(Call("GET", "/v1/healthz"))["status"]

    def pause(self) -> str:
        """Let the service begin no episode and send no model call until `resume`; returns its status.

        Calls that are held wait as long as that takes; nothing that is held is timed.
        """
        return self._send(Call("POST", "/v1/pause"))["status"]

    def resume(self) -> str:
        """Let the service go on; returns its status."""
        return self._send(Call("POST", "/v1/resume"))["status"]

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _send(self, call: Call) -> Any:
        import httpx

        attempt = 0
        while True:
            response: httpx.Response | None = None
            try:
                response = self._http.request(
                    call.method, call.path, json=call.json, content=call.content, params=call.params, headers=call.headers
                )
                if response.is_success:
                    return response.content if call.raw else response.json()
                failure: ServiceError = failed(response)
            except httpx.TransportError as error:
                failure = unreachable(self.url, error)
            if not may_repeat(call, attempt, response):
                raise failure
            time.sleep(pause(attempt, response))
            attempt += 1

    def _events(self, path: str, after: int) -> Iterator[Event]:
        import httpx
        from httpx_sse import connect_sse

        attempt = 0
        while True:
            try:
                timeout = httpx.Timeout(self.timeout, read=STREAM_TIMEOUT)
                headers = {"Last-Event-ID": str(after)}
                with connect_sse(self._http, "GET", path, headers=headers, timeout=timeout) as stream:
                    if not stream.response.is_success:
                        stream.response.read()
                        raise failed(stream.response)
                    for line in stream.iter_sse():
                        if not line.data:
                            continue  # a sign of life: httpx-sse makes an empty event of it
                        event, attempt = read_event(line), 0
                        after = event.id
                        yield event
                        if event.kind == "finished":
                            return
                failure: ServiceError = ServiceUnavailable(f"{path}: the stream of events ended early", 0, "")
            except httpx.TransportError as error:
                failure = unreachable(self.url, error)
            except ServiceUnavailable as error:
                failure = error
            attempt += 1
            if attempt >= ATTEMPTS:
                raise failure
            time.sleep(pause(attempt))


class Rollout:
    """Groups of episodes that the service plays."""

    def __init__(self, client: Client, state: RolloutState) -> None:
        self._client = client
        self.id = state.id
        self.state = state
        """As last heard of."""

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield the rollout's events until it is over: `group` for each that is durable, at last `finished`.

        Args:
            after: only behind the event with this id.
        """
        return self._client._events(f"/v1/rollouts/{self.id}/events", after)

    def wait(self) -> RolloutState:
        """Wait until it is over."""
        for _ in self.events():
            pass
        return self.refresh()

    def refresh(self) -> RolloutState:
        """Ask where it is."""
        self.state = read_rollout(self._client._send(Call("GET", f"/v1/rollouts/{self.id}")))
        return self.state

    def cancel(self) -> RolloutState:
        """End it; what is durable stays."""
        self.state = read_rollout(self._client._send(Call("DELETE", f"/v1/rollouts/{self.id}")))
        return self.state

    def pause(self) -> RolloutState:
        """Let it begin no episode and send no model call until `resume`, also over a restart of the service."""
        self.state = read_rollout(self._client._send(Call("POST", f"/v1/rollouts/{self.id}/pause")))
        return self.state

    def resume(self) -> RolloutState:
        """Go on with it."""
        self.state = read_rollout(self._client._send(Call("POST", f"/v1/rollouts/{self.id}/resume")))
        return self.state


class RemoteRun:
    """A training run on the service's machines."""

    def __init__(self, client: Client, state: RunState) -> None:
        self._client = client
        self.id = state.id
        self.state = state
        """As last heard of."""

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield the run's events until it is over: `stage`, `step` with its metrics, `warning`, at last `finished`.

        Args:
            after: only behind the event with this id.
        """
        return self._client._events(f"/v1/runs/{self.id}/events", after)

    def wait(self) -> RunState:
        """Wait until it is over."""
        for _ in self.events():
            pass
        return self.refresh()

    def refresh(self) -> RunState:
        """Ask where it is."""
        self.state = read_run(self._client._send(Call("GET", f"/v1/runs/{self.id}")))
        return self.state

    def cancel(self) -> RunState:
        """End it, and wait until it has saved a checkpoint and ended.

        Raises:
            ServiceUnavailable: that took longer than two minutes.
        """
        self.state = read_run(self._client._send(Call("DELETE", f"/v1/runs/{self.id}")))
        for _ in range(CANCEL_LOOKS):
            if self.state.over:
                return self.state
            time.sleep(CANCEL_PAUSE)
            self.refresh()
        raise not_ended(self.state)

    def resume(self) -> RunState:
        """Go on after it failed or was cancelled, from its last checkpoint."""
        self.state = read_run(self._client._send(Call("POST", f"/v1/runs/{self.id}/resume", safe=False)))
        return self.state

    def metrics(self, after: int = -1) -> list[dict[str, Any]]:
        """Metrics of the steps behind `after`, in order."""
        return self._client._send(Call("GET", f"/v1/runs/{self.id}/metrics", params={"after": after}))["metrics"]

    def evaluate(self, split: str = "eval", limit: int = 0) -> Evaluation:
        """Play a split greedily with the trained model.

        Args:
            split: of the tasks.
            limit: tasks at most; 0: the run's own limit.
        """
        call = Call("POST", f"/v1/runs/{self.id}/evaluate", {"split": split, "limit": limit})
        return read_evaluation(self._client._send(call))

    def generate(self, messages: Sequence[Any], sampling: SamplingParams | None = None) -> AssistantMessage:
        """Ask the trained model."""
        return read_assistant(self._client._send(generate_call(self.id, messages, sampling)))

    def files(self) -> dict[str, int]:
        """Names and bytes of what it has made: metrics, plot, timeline, and the model as a Hugging Face folder, `hf/`."""
        return {row["name"]: row["size"] for row in self._client._send(Call("GET", f"/v1/runs/{self.id}/files"))["files"]}

    def file(self, name: str) -> bytes:
        """One of these files."""
        return self._client._send(Call("GET", f"/v1/runs/{self.id}/files/{name}", raw=True))


class RemoteSession(SessionFields):
    """One episode that is played from here.

    Leaving the context finishes it, also when its limit on turns or tokens has ended it, or cancels it after any other error.
    """

    def __init__(self, client: Client, opened: Mapping[str, Any]) -> None:
        super().__init__(opened)
        self._client = client

    def chat(self, messages: Sequence[Any], **settings: Any) -> dict[str, Any]:
        """One model call; returns the assistant's message.

        Args:
            messages: OpenAI messages, or `Message` objects.
            **settings: fields of a chat request, such as `max_tokens`.
        """
        message = read_message(self._client._send(chat_call(self.id, messages, settings)))
        self._turns += 1
        return message

    def step(self, action: AssistantMessage | Mapping[str, Any] | str) -> Step:
        """Act in the environment; tool calls go to its tools."""
        return Step(**self._client._send(step_call(self.id, action)))

    def reward(self, value: float, name: str = "reward") -> None:
        """Set a component of the reward from here."""
        self._client._send(reward_call(self.id, value, name))

    def finish(self) -> Finished:
        """End the episode; returns when its trajectory is scored and durable."""
        if self.finished is None:
            self.finished = Finished(**self._client._send(Call("POST", f"/v1/sessions/{self.id}/finish")))
        return self.finished

    def cancel(self) -> None:
        """End it without a reward."""
        self._client._send(Call("DELETE", f"/v1/sessions/{self.id}"))

    def events(self, after: int = 0) -> Iterator[Event]:
        """Yield the session's events until it is over."""
        return self._client._events(f"/v1/sessions/{self.id}/events", after)

    def trajectory(self) -> Trajectory:
        """The recorded trajectory, once the session is finished."""
        return self._client.trajectory(self.trajectory_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.finished is not None:
            return
        if at_limit(error) or (error is None and self._turns):
            self.finish()
        else:
            self.cancel()


def attach() -> RemoteSession:
    """The session that this process was started to play, from `RELAX_BASE_URL`, `RELAX_SESSION_ID` and `RELAX_SESSION_KEY`.

    A training run starts its agents with these; for a session of `relax serve` they are its URL, the session's id and its key.

    Raises:
        ConfigError: the process was not started as an agent.
    """
    names = ("RELAX_BASE_URL", "RELAX_SESSION_ID", "RELAX_SESSION_KEY")
    url, id, key = (os.environ.get(name, "") for name in names)
    if not (url and id and key):
        missing = [name for name in names if not os.environ.get(name)]
        raise ConfigError(f"{', '.join(missing)} not set: this process was not started as an agent of a training run")
    client = Client(url, key)
    state = client._send(Call("GET", f"/v1/sessions/{id}"))
    return RemoteSession(client, state | {"key": key, "base_url": f"{url}/v1/sessions/{id}/openai/v1"})
