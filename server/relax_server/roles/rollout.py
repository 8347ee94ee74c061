"""The rollout role: plays episodes against the engines and commits finished groups to the journal."""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

from relax_sdk.errors import RelaxError, RunError
from relax_sdk.evaluation import Evaluation, Played
from relax_sdk.examples import gives_examples
from relax_sdk.media import MediaStore
from relax_sdk.session import Agent
from relax_server.engines.addresses import EngineAddress
from relax_server.engines.coalesce import CoalescingEngine
from relax_server.engines.kinds import connect
from relax_server.garbage import settle
from relax_server.gateway.agent.gateway import AgentGateway
from relax_server.journal import open_journal
from relax_server.models.processor import Processor
from relax_server.roles.channel import Outlet
from relax_server.roles.layout import RunLayout
from relax_server.roles.messages import (
    Begin,
    Chat,
    ChatDone,
    EngineLeft,
    Evaluate,
    Evaluated,
    Evaluating,
    Loading,
    MakeWarmup,
    Published,
    RolloutReady,
    RolloutReport,
    SetEngines,
    StartRollout,
    Stop,
    WarmupMade,
    Warn,
)
from relax_server.rollout.context import default_agent
from relax_server.rollout.otel_traces import open_traces
from relax_server.rollout.pool import EnginePool
from relax_server.rollout.threads import CallThreads
from relax_server.rollout.warmup import make_warmup
from relax_server.rollout.worker import RolloutWorker
from relax_server.timeline import Timeline

STATS_SECONDS = 1.0
"""Most seconds between two reports of the rollout's figures."""

UNLIKE = (
    "{env}: the episodes of a group did not begin with the same observation, though they have task and seed in common; their "
    "rewards do not compare. Draw what is random in `reset` from self.np_random, after super().reset(seed=seed), or take it "
    "from the task. Not said again; the metric rollout_unlike_groups counts the groups"
)


def run_rollout(channel: Outlet, inbox: queue.SimpleQueue[Any], first: StartRollout) -> None:
    """Serve until a `Stop`."""
    asyncio.run(RolloutRole(channel, first).serve(inbox))


class RolloutRole:
    """A `RolloutWorker` that listens to the controller."""

    def __init__(self, channel: Outlet, first: StartRollout) -> None:
        self.channel, self.first = channel, first
        layout = RunLayout(first.folder)
        self.processor = Processor.load(first.model_path, first.features)
        self.store = MediaStore(layout.media)
        self.journal = open_journal(first.journal or layout.journal, claim=first.claim)
        self.pool = EnginePool(map(self.engine, first.engines))
        self.leaving: set[str] = set()
        """Engines that only finish what they have."""
        self.gateway: AgentGateway | None = None
        """The gateway between the model and agents in processes of their own."""
        agent: Agent | None = first.agent
        warmup: Agent | None = None
        if isinstance(first.agent, (str, Sequence)):
            fork = first.config.rollout.fork_agents
            self.gateway = AgentGateway(first.agent, self.processor, self.store, CallThreads("agent media", 2), fork)
            agent, warmup = self.gateway.play, default_agent(first.spec.load())
        self.traces = open_traces(first.config.tracking.traces, first.run, first.config.model)
        self.worker = RolloutWorker(
            first.spec,
            first.config,
            self.processor,
            self.pool,
            self.store,
            self.journal,
            first.run,
            agent=agent,
            warmup_agent=warmup,
            traces=self.traces,
            timeline=Timeline(layout.timeline if first.train else None, "rollout"),
        )
        self.tasks: set[asyncio.Task[None]] = set()
        self.arrived: asyncio.Queue[Any] = asyncio.Queue()
        self.stepped = asyncio.Event()
        """The trainer is a step further: its next row of metrics is to have the figures of now."""

    async def serve(self, inbox: queue.SimpleQueue[Any]) -> None:
        """Handle messages until a `Stop`; a task that fails ends the process with its error."""
        loop = asyncio.get_running_loop()

        def forward() -> None:
            while True:
                loop.call_soon_threadsafe(self.arrived.put_nowait, inbox.get())

        threading.Thread(target=forward, name="inbox", daemon=True).start()
        self.channel.send(RolloutReady("eval" in self.worker.splits, gives_examples(self.worker.context.env_class)))
        self.spawn(self.report())
        while True:
            message = await self.arrived.get()
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, Stop):
                await self.close()
                return
            await self.handle(message)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task; its failure is raised by `serve`."""
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self.arrived.put_nowait(error)

        task.add_done_callback(done)

    async def handle(self, message: Any) -> None:
        """Act on one message; anything long becomes a task."""
        if isinstance(message, Begin):
            settle()
            self.worker.update(version=message.version, consumed=message.consumed, dropped=message.dropped)
            self.spawn(self.worker.run())
        elif isinstance(message, Published):
            self.worker.update(version=message.version, consumed=message.consumed, dropped=message.dropped)
            self.stepped.set()
        elif isinstance(message, Loading):
            self.pool.loading = message.version
        elif isinstance(message, SetEngines):
            self.set_engines(message)
        elif isinstance(message, Evaluate):
            self.spawn(self.evaluate(message))
        elif isinstance(message, Chat):
            self.spawn(self.chat(message))
        elif isinstance(message, MakeWarmup):
            self.spawn(self.warm_up(message))
        else:
            raise RunError(f"the rollout role does not know {type(message).__name__}")

    def set_engines(self, message: SetEngines) -> None:
        """Let new engines join, and those leave that are no longer named."""
        known = {engine.url for engine in self.pool.engines} - self.leaving
        for address in message.engines:
            if address.url not in known:
                self.leaving.discard(address.url)
                self.pool.add(self.engine(address))
        for url in known - {address.url for address in message.engines}:
            self.leaving.add(url)
            self.spawn(self.leave(url, message.drain))

    async def leave(self, url: str, drain: float) -> None:
        """Take an engine out of the pool; its calls end, or begin again elsewhere."""
        await self.pool.remove(url, drain, move=True)
        self.leaving.discard(url)
        self.channel.send(EngineLeft(url))

    def engine(self, address: EngineAddress) -> CoalescingEngine:
        """A client of an engine."""

        def warn(text: str) -> None:
            self.channel.send(Warn(text, "rollout"))

        return CoalescingEngine(connect(address, self.store.root, self.first.model_path, warn))

    async def evaluate(self, message: Evaluate) -> None:
        told = 0.0

        def tell(played: Played) -> None:
            nonlocal told
            if time.monotonic() - told > STATS_SECONDS or played.episodes == played.of:
                told = time.monotonic()
                self.channel.send(Evaluating(message.step, played))

        result = await self.worker.evaluate(message.limit, split=message.split, step=message.step, on_played=tell)
        kept = [] if self.first.train else result.trajectories  # a run has them in its journal
        evaluation = Evaluation(result.mean_reward, result.ci95, result.n, result.components, result.failures, kept)
        self.channel.send(Evaluated(message.step, evaluation, result.version_min or 0, result.version_max or 0))

    async def chat(self, message: Chat) -> None:
        try:
            answer = await self.worker.generate(list(message.messages), message.sampling)
            self.channel.send(ChatDone(message.id, answer, None))
        except RelaxError as error:
            self.channel.send(ChatDone(message.id, None, f"{type(error).__name__}: {error}"))

    async def warm_up(self, message: MakeWarmup) -> None:
        made = await make_warmup(self.worker, message.groups, self.first.config.warmup.batch_size)
        self.channel.send(WarmupMade(made))

    async def report(self) -> None:
        """Figures at every step and once a second, new failures, and once that the members of a group began differently."""
        warned, unlike, due = 0, False, time.monotonic()
        while True:
            stats = self.worker.stats()
            by_clock = time.monotonic() >= due
            if by_clock:
                due = time.monotonic() + STATS_SECONDS
            self.channel.send(RolloutReport(dataclasses.asdict(stats), by_clock))
            failed = sum(stats.failures.values())
            if failed > warned:
                last = stats.last_errors[-1] if stats.last_errors else "?"
                self.channel.send(Warn(f"{failed - warned} episode attempts failed; the last: {last}", "rollout"))
                warned = failed
            if stats.unlike_groups and not unlike:
                unlike = True
                self.channel.send(Warn(UNLIKE.format(env=self.worker.spec.id), "rollout"))
            with suppress(TimeoutError):
                await asyncio.wait_for(self.stepped.wait(), max(due - time.monotonic(), 0.0))
            self.stepped.clear()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.worker.close()
        if self.gateway is not None:
            await self.gateway.close()
        await self.pool.close()
        self.journal.close()
        await asyncio.to_thread(self.traces.close)
