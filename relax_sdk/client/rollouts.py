"""Rollouts: groups of episodes that a rollout service plays."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from relax_sdk.client.transport import AsyncTransport, Call, Event, Transport


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


class Rollout:
    """Groups of episodes that the service plays."""

    def __init__(self, transport: Transport, state: RolloutState) -> None:
        self._transport = transport
        self.id = state.id
        self.state = state
        """As last heard of."""

    def events(self, after: int = 0) -> Generator[Event]:
        """Yield the rollout's events until it is over: `group` for each that is durable, at last `finished`.

        Args:
            after: only behind the event with this id.
        """
        return self._transport.events(f"/v1/rollouts/{self.id}/events", after)

    def wait(self) -> RolloutState:
        """Wait until it is over."""
        for _ in self.events():
            pass
        return self.refresh()

    def refresh(self) -> RolloutState:
        """Ask where it is."""
        self.state = read_rollout(self._transport.send(Call("GET", f"/v1/rollouts/{self.id}")))
        return self.state

    def cancel(self) -> RolloutState:
        """End it; what is durable stays."""
        self.state = read_rollout(self._transport.send(Call("DELETE", f"/v1/rollouts/{self.id}")))
        return self.state

    def pause(self) -> RolloutState:
        """Let it begin no episode and send no model call until `resume`, also over a restart of the service."""
        self.state = read_rollout(self._transport.send(Call("POST", f"/v1/rollouts/{self.id}/pause")))
        return self.state

    def resume(self) -> RolloutState:
        """Go on with it."""
        self.state = read_rollout(self._transport.send(Call("POST", f"/v1/rollouts/{self.id}/resume")))
        return self.state


class AsyncRollout:
    """`Rollout` for asyncio."""

    def __init__(self, transport: AsyncTransport, state: RolloutState) -> None:
        self._transport = transport
        self.id = state.id
        self.state = state

    def events(self, after: int = 0) -> AsyncGenerator[Event]:
        """See `Rollout.events`."""
        return self._transport.events(f"/v1/rollouts/{self.id}/events", after)

    async def wait(self) -> RolloutState:
        """See `Rollout.wait`."""
        async for _ in self.events():
            pass
        return await self.refresh()

    async def refresh(self) -> RolloutState:
        """See `Rollout.refresh`."""
        self.state = read_rollout(await self._transport.send(Call("GET", f"/v1/rollouts/{self.id}")))
        return self.state

    async def cancel(self) -> RolloutState:
        """See `Rollout.cancel`."""
        self.state = read_rollout(await self._transport.send(Call("DELETE", f"/v1/rollouts/{self.id}")))
        return self.state

    async def pause(self) -> RolloutState:
        """See `Rollout.pause`."""
        self.state = read_rollout(await self._transport.send(Call("POST", f"/v1/rollouts/{self.id}/pause")))
        return self.state

    async def resume(self) -> RolloutState:
        """See `Rollout.resume`."""
        self.state = read_rollout(await self._transport.send(Call("POST", f"/v1/rollouts/{self.id}/resume")))
        return self.state


def submit_call(env: str, settings: dict[str, Any], idempotency_key: str | None) -> Call:
    """The request that starts a rollout; a repetition with the same key starts no other."""
    key = idempotency_key or uuid.uuid4().hex
    return Call("POST", "/v1/rollouts", {"env": env} | settings, headers={"Idempotency-Key": key})


def read_rollout(body: Mapping[str, Any]) -> RolloutState:
    """The state in an answer."""
    return RolloutState(body["id"], body["state"], body["counts"], body["error"])
