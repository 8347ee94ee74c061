"""`Client` and `AsyncClient`: a rollout service, call by call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import quote

from relax_sdk.client.rollouts import AsyncRollout, Rollout, read_rollout, submit_call
from relax_sdk.client.runs import AsyncRemoteRun, RemoteRun, RunState, read_run, run_call
from relax_sdk.client.sessions import AsyncRemoteSession, RemoteSession, open_call
from relax_sdk.client.trajectories import read_trajectory
from relax_sdk.client.transport import TIMEOUT, URL, AsyncTransport, Call, Transport
from relax_sdk.client.upload import uploadable
from relax_sdk.env import Env
from relax_sdk.media import Media, MediaRef
from relax_sdk.registry import EnvSpec
from relax_sdk.trajectory import Trajectory


class Client:
    """A rollout service.

    What is safe to repeat is repeated, with growing pauses, when the service cannot be reached or is busy; an event stream
    goes on where it broke off. Every method raises `ServiceError` when the service refuses, `ServiceUnavailable` when it
    cannot be reached in the end.

    Args:
        url: of the service.
        key: for services that want one.
        timeout: seconds for one request.
    """

    def __init__(self, url: str = URL, key: str | None = None, *, timeout: float = TIMEOUT) -> None:
        self.transport = Transport(url, key, timeout)
        """Sends the requests."""

    def envs(self) -> list[dict[str, Any]]:
        """The environments that can be played."""
        return self.transport.send(Call("GET", "/v1/envs"))["envs"]

    def models(self) -> dict[str, Any]:
        """The model, its engines and their weight versions."""
        return self.transport.send(Call("GET", "/v1/models"))

    def register_env(self, id: str, **source: Any) -> dict[str, Any]:
        """Register an environment of a package that is installed there; takes a key with the right to upload.

        Args:
            id: its name there.
            **source: `entry="package.module:Class"` and perhaps `tasks="package.module:function"`; or `package="name"`, a
                distribution that registers it.

        Returns:
            What the service knows of it.
        """
        return self.transport.send(Call("POST", "/v1/envs", {"id": id} | source))

    def upload_env(self, env: str | type[Env] | EnvSpec, id: str | None = None) -> dict[str, Any]:
        """Send an environment's code there, where it runs in a worker process; takes a key with the right to upload.

        Args:
            env: a registered name, a class, or a spec.
            id: its name there; default: its own.

        Raises:
            ConfigError: it cannot be pickled.
        """
        return self.transport.send(Call("POST", "/v1/envs", uploadable(env, id)))

    def remove_env(self, id: str) -> None:
        """Forget an environment that was registered or uploaded."""
        self.transport.send(Call("DELETE", f"/v1/envs/{quote(id)}"))

    def rollout(self, env: str, *, idempotency_key: str | None = None, **settings: Any) -> Rollout:
        """Let the service play groups of episodes.

        Args:
            env: registered there.
            idempotency_key: the same key gives the same rollout; default: a new one, kept over repetitions of this call.
            **settings: `n` or `tasks`, `group_size`, `split`, `seed`, `sampling`, `limits`, `run`, `on_failure`.
        """
        return Rollout(self.transport, read_rollout(self.transport.send(submit_call(env, settings, idempotency_key))))

    def get_rollout(self, id: str) -> Rollout:
        """A rollout that was submitted before."""
        return Rollout(self.transport, read_rollout(self.transport.send(Call("GET", f"/v1/rollouts/{id}"))))

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
        return RemoteRun(self.transport, read_run(self.transport.send(run_call(env, config, agent, idempotency_key))))

    def get_run(self, id: str) -> RemoteRun:
        """A training run that was submitted before."""
        return RemoteRun(self.transport, read_run(self.transport.send(Call("GET", f"/v1/runs/{id}"))))

    def runs(self) -> list[RunState]:
        """The caller's training runs, newest first."""
        return [read_run(row) for row in self.transport.send(Call("GET", "/v1/runs"))["runs"]]

    def session(self, env: str = "none", **settings: Any) -> RemoteSession:
        """Open an episode that is played from here; a context manager.

        Args:
            env: registered there; `none`: the world is the agent's own.
            **settings: `split`, `task_index`, `seed`, `sample_index`, `mode`, `sampling`, `limits`, `media`, `metadata`.
        """
        return RemoteSession(self.transport, self.transport.send(open_call(env, settings)))

    def trajectory(self, id: str) -> Trajectory:
        """A trajectory with all its tokens."""
        return read_trajectory(self.transport.send(Call("GET", f"/v1/trajectories/{id}")))

    def media(self, sha256: str) -> bytes:
        """The bytes of a media item."""
        return self.transport.send(Call("GET", f"/v1/media/{sha256}", raw=True))

    def put_media(self, media: Media) -> MediaRef:
        """Store a media item there; messages can then name it as `relax-media:<sha256>`."""
        return MediaRef(**self.transport.send(Call("POST", f"/v1/media/{media.kind}", content=media.bytes())))

    def status(self) -> str:
        """`ok`, `paused` or `draining`."""
        return self.transport.send(Call("GET", "/v1/healthz"))["status"]

    def pause(self) -> str:
        """Let the service begin no episode and send no model call until `resume`; returns its status.

        Calls that are held wait as long as that takes; nothing that is held is timed.
        """
        return self.transport.send(Call("POST", "/v1/pause"))["status"]

    def resume(self) -> str:
        """Let the service go on; returns its status."""
        return self.transport.send(Call("POST", "/v1/resume"))["status"]

    def close(self) -> None:
        """Close the connections."""
        self.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio; see there."""

    def __init__(self, url: str = URL, key: str | None = None, *, timeout: float = TIMEOUT) -> None:
        self.transport = AsyncTransport(url, key, timeout)

    async def envs(self) -> list[dict[str, Any]]:
        """See `Client.envs`."""
        return (await self.transport.send(Call("GET", "/v1/envs")))["envs"]

    async def models(self) -> dict[str, Any]:
        """See `Client.models`."""
        return await self.transport.send(Call("GET", "/v1/models"))

    async def register_env(self, id: str, **source: Any) -> dict[str, Any]:
        """See `Client.register_env`."""
        return await self.transport.send(Call("POST", "/v1/envs", {"id": id} | source))

    async def upload_env(self, env: str | type[Env] | EnvSpec, id: str | None = None) -> dict[str, Any]:
        """See `Client.upload_env`."""
        return await self.transport.send(Call("POST", "/v1/envs", await asyncio.to_thread(uploadable, env, id)))

    async def remove_env(self, id: str) -> None:
        """See `Client.remove_env`."""
        await self.transport.send(Call("DELETE", f"/v1/envs/{quote(id)}"))

    async def rollout(self, env: str, *, idempotency_key: str | None = None, **settings: Any) -> AsyncRollout:
        """See `Client.rollout`."""
        return AsyncRollout(
            self.transport, read_rollout(await self.transport.send(submit_call(env, settings, idempotency_key)))
        )

    async def get_rollout(self, id: str) -> AsyncRollout:
        """See `Client.get_rollout`."""
        return AsyncRollout(self.transport, read_rollout(await self.transport.send(Call("GET", f"/v1/rollouts/{id}"))))

    async def run(
        self, env: str, *, config: Mapping[str, Any], agent: Sequence[str] | None = None, idempotency_key: str | None = None
    ) -> AsyncRemoteRun:
        """See `Client.run`."""
        return AsyncRemoteRun(
            self.transport, read_run(await self.transport.send(run_call(env, config, agent, idempotency_key)))
        )

    async def get_run(self, id: str) -> AsyncRemoteRun:
        """See `Client.get_run`."""
        return AsyncRemoteRun(self.transport, read_run(await self.transport.send(Call("GET", f"/v1/runs/{id}"))))

    async def runs(self) -> list[RunState]:
        """See `Client.runs`."""
        return [read_run(row) for row in (await self.transport.send(Call("GET", "/v1/runs")))["runs"]]

    async def session(self, env: str = "none", **settings: Any) -> AsyncRemoteSession:
        """See `Client.session`; `async with await client.session(…) as session`."""
        return AsyncRemoteSession(self.transport, await self.transport.send(open_call(env, settings)))

    async def trajectory(self, id: str) -> Trajectory:
        """See `Client.trajectory`."""
        return read_trajectory(await self.transport.send(Call("GET", f"/v1/trajectories/{id}")))

    async def media(self, sha256: str) -> bytes:
        """See `Client.media`."""
        return await self.transport.send(Call("GET", f"/v1/media/{sha256}", raw=True))

    async def put_media(self, media: Media) -> MediaRef:
        """See `Client.put_media`."""
        return MediaRef(**await self.transport.send(Call("POST", f"/v1/media/{media.kind}", content=media.bytes())))

    async def status(self) -> str:
        """See `Client.status`."""
        return (await self.transport.send(Call("GET", "/v1/healthz")))["status"]

    async def pause(self) -> str:
        """See `Client.pause`."""
        return (await self.transport.send(Call("POST", "/v1/pause")))["status"]

    async def resume(self) -> str:
        """See `Client.resume`."""
        return (await self.transport.send(Call("POST", "/v1/resume")))["status"]

    async def close(self) -> None:
        """Close the connections."""
        await self.transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
