"""The `local` runtime: all roles as processes on this machine, no Ray."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from relax_sdk.config import RunConfig, SamplingParams
from relax_sdk.doctor import examine_machine
from relax_sdk.endpoint import Endpoint, EndpointEvaluation
from relax_sdk.errors import EngineError, RunError
from relax_sdk.evaluation import Evaluation
from relax_sdk.findings import Finding
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.registry import EnvSpec
from relax_sdk.runtime import Job, Observer, Tell, silent
from relax_sdk.stop_signals import Interrupted, StopSignals
from relax_server.models.catalog import resolve_model
from relax_server.roles.host import LocalHost
from relax_server.roles.launch import Launch
from relax_server.roles.layout import RunLayout
from relax_server.roles.messages import (
    Chat,
    ChatDone,
    Died,
    Evaluate,
    Evaluated,
    Evaluating,
    Failed,
    RolloutReady,
    StartRollout,
)
from relax_server.roles.slot import start_engine
from relax_server.rollout.endpoint import evaluate_endpoint

T = TypeVar("T")

ANSWER_SECONDS = 600.0
"""For an episode of an evaluation, or a generation by hand."""


class LoopThread:
    """An event loop in a thread of its own, so that `fit()` also works where a loop is running already."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="relax-controller", daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have a function called in the loop; without effect once that has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)
        if not self._thread.is_alive():
            self.loop.close()


def await_end(run: Callable[[], Coroutine[Any, Any, None]], request_stop: Callable[[bool], None], observer: Observer) -> None:
    """Carry a run out in a thread, and wait for its end; signals ask it to stop.

    Args:
        run: carries it out.
        request_stop: called in the thread's event loop; with `True` for the end at once.
        observer: told how a run ended that was asked to stop.

    Raises:
        RelaxError: what the run ended with.
        Interrupted: a signal stopped it.
    """
    thread = LoopThread()
    try:
        with StopSignals(lambda at_once: thread.call(request_stop, at_once)) as signals:
            try:
                thread.submit(run()).result()
            except RunError as error:
                if signals.caught is None:
                    raise
                thread.call(observer.warn, str(error))
            if signals.caught is not None:
                raise Interrupted(signals.caught)
    finally:
        thread.close()


class LocalRuntime:
    """Carries out runs on this machine."""

    def fit(self, job: Job, observer: Observer) -> None:
        """Train to the last step; Ctrl-C, SIGTERM and SIGHUP end with a checkpoint where there is something to keep.

        Raises:
            ConfigError: environment, model and settings do not fit together.
            RunError: the run ended early; it can be resumed.
            Interrupted: a signal stopped it; a `KeyboardInterrupt`.
        """
        launch = Launch(job, observer)
        await_end(launch.run, launch.request_stop, observer)

    def open_model(self, job: Job, tell: Tell) -> LocalModel:
        """Start an engine and a rollout process with the run's trained weights."""
        return LocalModel(job, tell)

    def evaluate_endpoint(
        self, spec: EnvSpec, config: RunConfig, endpoint: Endpoint, split: str, limit: int | None, tell: Tell
    ) -> EndpointEvaluation:
        """Play a split with a model elsewhere; no engine is started."""
        thread = LoopThread()
        try:
            return thread.submit(
                evaluate_endpoint(spec, config, endpoint, split, limit, lambda played: tell(str(played)))
            ).result()
        finally:
            thread.close()

    def examine(self, folder: Path, config: RunConfig) -> list[Finding]:
        """Whether this machine can train."""
        return examine_machine(folder)


class LocalModel:
    """A trained model behind an engine."""

    def __init__(self, job: Job, tell: Tell) -> None:
        self._job = job
        self._thread = LoopThread()
        try:
            self._thread.submit(self._start(tell)).result()
        except BaseException:
            self.close()
            raise

    async def _start(self, tell: Tell) -> None:
        job = self._job
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        trained = RunLayout(job.folder).weights
        if not trained.exists():
            raise RunError(f"{job.folder} has no trained weights yet (no {trained.name}/ folder)")
        base = resolve_model(job.config.model, job.config.seed)
        host = LocalHost()
        tell("starting an engine")
        self._engine = await start_engine(job, host, trained, job.config.steps, train=False, stage=tell)
        tell("starting the environment")
        self._rollout = host.role("rollout", job.folder, self._inbox.put_nowait)
        await self._rollout.start(
            StartRollout(job.spec, job.agent, job.config, job.folder.name, job.folder, base, (self._engine.url,), train=False)
        )
        self._splits_ready = await self._answer(RolloutReady)
        self._chats = 0

    async def _answer(self, kind: type[T], tell: Tell = silent) -> T:
        try:
            async with asyncio.timeout(ANSWER_SECONDS) as limit:
                while True:
                    message = await self._inbox.get()
                    if isinstance(message, kind):
                        return message
                    if isinstance(message, Evaluating):
                        limit.reschedule(asyncio.get_running_loop().time() + ANSWER_SECONDS)
                        tell(str(message.played))
                    if isinstance(message, (Failed, Died)):
                        text = message.text if isinstance(message, Failed) else self._rollout.log_tail()
                        raise RunError(f"the rollout process failed: {text}")
        except TimeoutError:
            raise RunError(f"no answer within {ANSWER_SECONDS:.0f} s") from None

    def evaluate(self, split: str, limit: int, tell: Tell) -> Evaluation:
        """Play a split greedily."""

        async def ask() -> Evaluation:
            self._rollout.send(Evaluate(self._job.config.steps, split, limit))
            return (await self._answer(Evaluated, tell)).result

        return self._thread.submit(ask()).result()

    def generate(self, messages: list[Message], sampling: SamplingParams) -> AssistantMessage:
        """One answer."""

        async def ask() -> AssistantMessage:
            self._chats += 1
            self._rollout.send(Chat(self._chats, tuple(messages), sampling))
            done = await self._answer(ChatDone)
            if done.message is None:
                raise EngineError(done.error or "no answer")
            return done.message

        return self._thread.submit(ask()).result()

    def close(self) -> None:
        """Stop the engine and the rollout process."""

        async def stop() -> None:
            for name in ("_rollout", "_engine"):
                process = getattr(self, name, None)
                if process is not None:
                    await process.stop()

        self._thread.submit(stop()).result()
        self._thread.close()
