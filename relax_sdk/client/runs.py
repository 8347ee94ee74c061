"""Training runs on the machines of a rollout service."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_sdk.client.trajectories import read_recorded
from relax_sdk.client.transport import AsyncTransport, Call, Event, Transport, wire
from relax_sdk.config import SamplingParams
from relax_sdk.errors import ServiceUnavailable
from relax_sdk.evaluation import Evaluation
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.recorded import Trajectories

CANCEL_LOOKS, CANCEL_PAUSE = 240, 0.5
"""Looks at a run that was told to end, and seconds between two."""


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


class RemoteRun:
    """A training run on the service's machines."""

    def __init__(self, transport: Transport, state: RunState) -> None:
        self._transport = transport
        self.id = state.id
        self.state = state
        """As last heard of."""

    def events(self, after: int = 0) -> Generator[Event]:
        """Yield the run's events until it is over: `stage`, `step` with its metrics, `warning`, at last `finished`.

        Args:
            after: only behind the event with this id.
        """
        return self._transport.events(f"/v1/runs/{self.id}/events", after)

    def wait(self) -> RunState:
        """Wait until it is over."""
        for _ in self.events():
            pass
        return self.refresh()

    def refresh(self) -> RunState:
        """Ask where it is."""
        self.state = read_run(self._transport.send(Call("GET", f"/v1/runs/{self.id}")))
        return self.state

    def cancel(self) -> RunState:
        """End it, and wait until it has saved a checkpoint and ended.

        Raises:
            ServiceUnavailable: that took longer than two minutes.
        """
        self.state = read_run(self._transport.send(Call("DELETE", f"/v1/runs/{self.id}")))
        for _ in range(CANCEL_LOOKS):
            if self.state.over:
                return self.state
            time.sleep(CANCEL_PAUSE)
            self.refresh()
        raise _not_ended(self.state)

    def resume(self) -> RunState:
        """Go on after it failed or was cancelled, from its last checkpoint."""
        self.state = read_run(self._transport.send(Call("POST", f"/v1/runs/{self.id}/resume", safe=False)))
        return self.state

    def metrics(self, after: int = -1) -> list[dict[str, Any]]:
        """Metrics of the steps behind `after`, in order."""
        return self._transport.send(Call("GET", f"/v1/runs/{self.id}/metrics", params={"after": after}))["metrics"]

    def evaluate(self, split: str = "eval", limit: int = 0) -> Evaluation:
        """Play a split greedily with the trained model.

        Args:
            split: of the tasks.
            limit: tasks at most; 0: the run's own limit.
        """
        call = Call("POST", f"/v1/runs/{self.id}/evaluate", {"split": split, "limit": limit})
        return _read_evaluation(self._transport.send(call))

    def generate(self, messages: Sequence[Any], sampling: SamplingParams | None = None) -> AssistantMessage:
        """Ask the trained model."""
        return _read_assistant(self._transport.send(_generate_call(self.id, messages, sampling)))

    def files(self) -> dict[str, int]:
        """Names and bytes of what it has made: metrics, plot, timeline, and the model as a Hugging Face folder, `hf/`."""
        return {row["name"]: row["size"] for row in self._transport.send(Call("GET", f"/v1/runs/{self.id}/files"))["files"]}

    def file(self, name: str) -> bytes:
        """One of these files."""
        return self._transport.send(Call("GET", f"/v1/runs/{self.id}/files/{name}", raw=True))


class AsyncRemoteRun:
    """`RemoteRun` for asyncio."""

    def __init__(self, transport: AsyncTransport, state: RunState) -> None:
        self._transport = transport
        self.id = state.id
        self.state = state

    def events(self, after: int = 0) -> AsyncGenerator[Event]:
        """See `RemoteRun.events`."""
        return self._transport.events(f"/v1/runs/{self.id}/events", after)

    async def wait(self) -> RunState:
        """See `RemoteRun.wait`."""
        async for _ in self.events():
            pass
        return await self.refresh()

    async def refresh(self) -> RunState:
        """See `RemoteRun.refresh`."""
        self.state = read_run(await self._transport.send(Call("GET", f"/v1/runs/{self.id}")))
        return self.state

    async def cancel(self) -> RunState:
        """See `RemoteRun.cancel`."""
        self.state = read_run(await self._transport.send(Call("DELETE", f"/v1/runs/{self.id}")))
        for _ in range(CANCEL_LOOKS):
            if self.state.over:
                return self.state
            await asyncio.sleep(CANCEL_PAUSE)
            await self.refresh()
        raise _not_ended(self.state)

    async def resume(self) -> RunState:
        """See `RemoteRun.resume`."""
        self.state = read_run(await self._transport.send(Call("POST", f"/v1/runs/{self.id}/resume", safe=False)))
        return self.state

    async def metrics(self, after: int = -1) -> list[dict[str, Any]]:
        """See `RemoteRun.metrics`."""
        return (await self._transport.send(Call("GET", f"/v1/runs/{self.id}/metrics", params={"after": after})))["metrics"]

    async def evaluate(self, split: str = "eval", limit: int = 0) -> Evaluation:
        """See `RemoteRun.evaluate`."""
        call = Call("POST", f"/v1/runs/{self.id}/evaluate", {"split": split, "limit": limit})
        return _read_evaluation(await self._transport.send(call))

    async def generate(self, messages: Sequence[Any], sampling: SamplingParams | None = None) -> AssistantMessage:
        """See `RemoteRun.generate`."""
        return _read_assistant(await self._transport.send(_generate_call(self.id, messages, sampling)))

    async def files(self) -> dict[str, int]:
        """See `RemoteRun.files`."""
        rows = (await self._transport.send(Call("GET", f"/v1/runs/{self.id}/files")))["files"]
        return {row["name"]: row["size"] for row in rows}

    async def file(self, name: str) -> bytes:
        """See `RemoteRun.file`."""
        return await self._transport.send(Call("GET", f"/v1/runs/{self.id}/files/{name}", raw=True))


def run_call(env: str, config: Mapping[str, Any], agent: Sequence[str] | None, idempotency_key: str | None) -> Call:
    """The request that submits a run; a repetition with the same key submits no other."""
    body = {"env": env, "config": dict(config)} | ({"agent": list(agent)} if agent is not None else {})
    return Call("POST", "/v1/runs", body, headers={"Idempotency-Key": idempotency_key or uuid.uuid4().hex})


def read_run(body: Mapping[str, Any]) -> RunState:
    """The state in an answer."""
    return RunState(body["id"], body["state"], body["step"], body["error"])


def _not_ended(run: RunState) -> ServiceUnavailable:
    return ServiceUnavailable(f"run {run.id} was told to end and is still {run.state} after 2 minutes; look at it later")


def _generate_call(run: str, messages: Sequence[Any], sampling: SamplingParams | None) -> Call:
    body: dict[str, Any] = {"messages": [wire(message) for message in messages]}
    if sampling is not None:
        fields = ("max_new_tokens", "temperature", "top_p", "top_k", "ignore_eos", "sampling_seed")
        given = {name: getattr(sampling, name) for name in fields}
        given |= {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids)}
        body["sampling"] = {name: value for name, value in given.items() if value is not None}
    return Call("POST", f"/v1/runs/{run}/generate", body)


def _read_assistant(body: Mapping[str, Any]) -> AssistantMessage:
    message = Message.from_openai(body)
    assert isinstance(message, AssistantMessage)
    return message


def _read_evaluation(body: Mapping[str, Any]) -> Evaluation:
    ci95 = float("nan") if body["ci95"] is None else body["ci95"]  # of a single episode
    trajectories = Trajectories(read_recorded(row) for row in body.get("trajectories", ()))
    return Evaluation(**{**body, "ci95": ci95, "trajectories": trajectories})
