"""`AsyncClient`: a rollout service in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
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
from relax_sdk.errors import ServiceError, ServiceUnavailable
from relax_sdk.evaluation import Evaluation
from relax_sdk.media import Media, MediaRef
from relax_sdk.messages import AssistantMessage
from relax_sdk.registry import EnvSpec
from relax_sdk.trajectory import Trajectory

if TYPE_CHECKING:
    import httpx


class AsyncClient(Settings):
    """`Client` for asyncio; see there."""

    def __init__(self, url: str = URL, key: str | None = None, *, timeout: float = 600.0) -> None:
        import httpx

        super().__init__(url, key, timeout)
        self._http = httpx.AsyncClient(base_url=self.url, headers=self.headers, timeout=timeout, verify=self.verify)

    async def envs(self) -> list[dict[str, Any]]:
        """See `Client.envs`."""
        return (await self._send(Call("GET", "/v1/envs")))["envs"]

    async def models(self) -> dict[str, Any]:
        """See `Client.models`."""
        return await self._send(Call("GET", "/v1/models"))

    async def register_env(self, id: str, **source: Any) -> dict[str, Any]:
        """See `Client.register_env`."""
        return await self._send(Call("POST", "/v1/envs", {"id": id} | source))

    async def upload_env(self, env: str | type[Env] | EnvSpec, id: str | None = None) -> dict[str, Any]:
        """See `Client.upload_env`."""
        return await self._send(Call("POST", "/v1/envs", await asyncio.to_thread(uploadable, env, id)))

    async def remove_env(self, id: str) -> None:
        """See `Client.remove_env`."""
        await self._send(Call("DELETE", f"/v1/envs/{quote(id)}"))

    async def rollout(self, env: str, *, idempotency_key: str | None = None, **settings: Any) -> AsyncRollout:
        """See `Client.rollout`."""
        return AsyncRollout(self, read_rollout(await self._send(submit_call(env, settings, idempotency_key))))

    async def get_rollout(self, id: str) -> AsyncRollout:
        """See `Client.get_rollout`."""
        return AsyncRollout(self, read_rollout(await self._send(Call("GET", f"/v1/rollouts/{id}"))))

    async def run(
        self, env: str, *, config: Mapping[str, Any], agent: Sequence[str] | None = None, idempotency_key: str | None = None
    ) -> AsyncRemoteRun:
        """See `Client.run`."""
        return AsyncRemoteRun(self, read_run(await self._send(run_call(env, config, agent, idempotency_key))))

    async def get_run(self, id: str) -> AsyncRemoteRun:
        """See `Client.get_run`."""
        return AsyncRemoteRun(self, read_run(await self._send(Call("GET", f"/v1/runs/{id}"))))

    async def runs(self) -> list[RunState]:
        """See `Client.runs`."""
        return [read_run(row) for row in (await self._send(Call("GET", "/v1/runs")))["runs"]]

    async def session(self, env: str = "none", **settings: Any) -> AsyncRemoteSession:
        """See `Client.session`; `async with await client.session(…) as session`."""
        return AsyncRemoteSession(self, await self._send(open_call(env, settings)))

    async def trajectory(self, id: str) -> Trajectory:
        """See `Client.trajectory`."""
        return read_trajectory(await self._send(Call("GET", f"/v1/trajectories/{id}")))

    async def media(self, sha256: str) -> bytes:
        """See `Client.media`."""
        return await self._send(Call("GET", f"/v1/media/{sha256}", raw=True))

    async def put_media(self, media: Media) -> MediaRef:
        """See `Client.put_media`."""
        return MediaRef(**await self._send(Call("POST", f"/v1/media/{media.kind}", content=media.bytes())))

    async def status(self) -> str:
        """See `Client.status`."""
        return (await self._send(Call("GET", "/v1/healthz")))["status"]

    async def pause(self) -> str:
        """See `Client.pause`."""
        return (await self._send(Call("POST", "/v1/pause")))["status"]

    async def resume(self) -> str:
        """See `Client.resume`."""
        return (await self._send(Call("POST", "/v1/resume")))["status"]

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _send(self, call: Call) -> Any:
        import httpx

        attempt = 0
        while True:
            response: httpx.Response | None = None
            try:
                response = await self._http.request(
                    call.method, call.path, json=call.json, content=call.content, params=call.params, headers=call.headers
                )
                if response.is_success:
                    return response.content if call.raw else response.json()
                failure: ServiceError = failed(response)
            except httpx.TransportError as error:
                failure = unreachable(self.url, error)
            if not may_repeat(call, attempt, response):
                raise failure
            await asyncio.sleep(pause(attempt, response))
            attempt += 1

    async def _events(self, path: str, after: int) -> AsyncIterator[Event]:
        import httpx
        from httpx_sse import aconnect_sse

        attempt = 0
        while True:
            try:
                timeout = httpx.Timeout(self.timeout, read=STREAM_TIMEOUT)
                headers = {"Last-Event-ID": str(after)}
                async with aconnect_sse(self._http, "GET", path, headers=headers, timeout=timeout) as stream:
                    if not stream.response.is_success:
                        await stream.response.aread()
                        raise failed(stream.response)
                    async for line in stream.aiter_sse():
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
            await asyncio.sleep(pause(attempt))


class AsyncRollout:
    """`Rollout` for asyncio."""

    def __init__(self, client: AsyncClient, state: RolloutState) -> None:
        self._client = client
        self.id = state.id
        self.state = state

    def events(self, after: int = 0) -> AsyncIterator[Event]:
        """See `Rollout.events`."""
        return self._client._events(f"/v1/rollouts/{self.id}/events", after)

    async def wait(self) -> RolloutState:
        """See `Rollout.wait`."""
        async for _ in self.events():
            pass
        return await self.refresh()

    async def refresh(self) -> RolloutState:
        """See `Rollout.refresh`."""
        self.state = read_rollout(await self._client._send(Call("GET", f"/v1/rollouts/{self.id}")))
        return self.state

    async def cancel(self) -> RolloutState:
        """See `Rollout.cancel`."""
        self.state = read_rollout(await self._client._send(Call("DELETE", f"/v1/rollouts/{self.id}")))
        return self.state

    async def pause(self) -> RolloutState:
        """See `Rollout.pause`."""
        self.state = read_rollout(await self._client._send(Call("POST", f"/v1/rollouts/{self.id}/pause")))
        return self.state

    async def resume(self) -> RolloutState:
        """See `Rollout.resume`."""
        self.state = read_rollout(await self._client._send(Call("POST", f"/v1/rollouts/{self.id}/resume")))
        return self.state


class AsyncRemoteRun:
    """`RemoteRun` for asyncio."""

    def __init__(self, client: AsyncClient, state: RunState) -> None:
        self._client = client
        self.id = state.id
        self.state = state

    def events(self, after: int = 0) -> AsyncIterator[Event]:
        """See `RemoteRun.events`."""
        return self._client._events(f"/v1/runs/{self.id}/events", after)

    async def wait(self) -> RunState:
        """See `RemoteRun.wait`."""
        async for _ in self.events():
            pass
        return await self.refresh()

    async def refresh(self) -> RunState:
        """See `RemoteRun.refresh`."""
        self.state = read_run(await self._client._send(Call("GET", f"/v1/runs/{self.id}")))
        return self.state

    async def cancel(self) -> RunState:
        """See `RemoteRun.cancel`."""
        self.state = read_run(await self._client._send(Call("DELETE", f"/v1/runs/{self.id}")))
        for _ in range(CANCEL_LOOKS):
            if self.state.over:
                return self.state
            await asyncio.sleep(CANCEL_PAUSE)
            await self.refresh()
        raise not_ended(self.state)

    async def resume(self) -> RunState:
        """See `RemoteRun.resume`."""
        self.state = read_run(await self._client._send(Call("POST", f"/v1/runs/{self.id}/resume", safe=False)))
        return self.state

    async def metrics(self, after: int = -1) -> list[dict[str, Any]]:
        """See `RemoteRun.metrics`."""
        return (await self._client._send(Call("GET", f"/v1/runs/{self.id}/metrics", params={"after": after})))["metrics"]

    async def evaluate(self, split: str = "eval", limit: int = 0) -> Evaluation:
        """See `RemoteRun.evaluate`."""
        call = Call("POST", f"/v1/runs/{self.id}/evaluate", {"split": split, "limit": limit})
        return read_evaluation(await self._client._send(call))

    async def generate(self, messages: Sequence[Any], sampling: SamplingParams | None = None) -> AssistantMessage:
        """See `RemoteRun.generate`."""
        return read_assistant(await self._client._send(generate_call(self.id, messages, sampling)))

    async def files(self) -> dict[str, int]:
        """See `RemoteRun.files`."""
        rows = (await self._client._send(Call("GET", f"/v1/runs/{self.id}/files")))["files"]
        return {row["name"]: row["size"] for row in rows}

    async def file(self, name: str) -> bytes:
        """See `RemoteRun.file`."""
        return await self._client._send(Call("GET", f"/v1/runs/{self.id}/files/{name}", raw=True))


class AsyncRemoteSession(SessionFields):
    """`RemoteSession` for asyncio."""

    def __init__(self, client: AsyncClient, opened: Mapping[str, Any]) -> None:
        super().__init__(opened)
        self._client = client

    async def chat(self, messages: Sequence[Any], **settings: Any) -> dict[str, Any]:
        """See `RemoteSession.chat`."""
        message = read_message(await self._client._send(chat_call(self.id, messages, settings)))
        self._turns += 1
        return message

    async def step(self, action: AssistantMessage | Mapping[str, Any] | str) -> Step:
        """See `RemoteSession.step`."""
        return Step(**await self._client._send(step_call(self.id, action)))

    async def reward(self, value: float, name: str = "reward") -> None:
        """See `RemoteSession.reward`."""
        await self._client._send(reward_call(self.id, value, name))

    async def finish(self) -> Finished:
        """See `RemoteSession.finish`."""
        if self.finished is None:
            self.finished = Finished(**await self._client._send(Call("POST", f"/v1/sessions/{self.id}/finish")))
        return self.finished

    async def cancel(self) -> None:
        """See `RemoteSession.cancel`."""
        await self._client._send(Call("DELETE", f"/v1/sessions/{self.id}"))

    def events(self, after: int = 0) -> AsyncIterator[Event]:
        """See `RemoteSession.events`."""
        return self._client._events(f"/v1/sessions/{self.id}/events", after)

    async def trajectory(self) -> Trajectory:
        """See `RemoteSession.trajectory`."""
        return await self._client.trajectory(self.trajectory_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.finished is not None:
            return
        if at_limit(error) or (error is None and self._turns):
            await self.finish()
        else:
            await self.cancel()
