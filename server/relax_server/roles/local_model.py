"""A trained model on this machine: an engine with its weights, and a rollout process that plays and asks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Hashable
from dataclasses import replace
from typing import Any

from relax_sdk.config import SamplingParams
from relax_sdk.errors import EngineError, RunError
from relax_sdk.evaluation import Evaluation
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.recorded import Trajectories
from relax_sdk.runtime import Job, Tell, silent
from relax_server.models.catalog import resolve_model
from relax_server.roles.layout import RunLayout
from relax_server.roles.looking import recorded
from relax_server.roles.loop_thread import LoopThread
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
from relax_server.roles.placement import LocalPlacement
from relax_server.roles.slot import start_engine

ANSWER_SECONDS = 600.0
"""Seconds for an episode of an evaluation, or a generation by hand."""


class LocalModel:
    """A trained model behind an engine. Any number of threads may ask it; evaluations follow one another.

    Args:
        job: of the run that trained it.
        tell: told of every stage of the start.

    Raises:
        RunError: there are no weights yet, or the rollout process failed.
        EngineError: the engine did not start.
    """

    def __init__(self, job: Job, tell: Tell) -> None:
        self._job = job
        self._thread = LoopThread()
        self._numbers = itertools.count(1)
        self._waiting: dict[Hashable, asyncio.Future[Any]] = {}
        """Questions under way, by what answers them."""
        self._lost: RunError | None = None
        """Why nothing will answer any more."""
        self._told = silent
        self._limit: asyncio.Timeout | None = None
        """The time limit of the evaluation under way."""
        try:
            self._thread.submit(self._start(tell)).result()
        except BaseException:
            self.close()
            raise

    async def _start(self, tell: Tell) -> None:
        job = self._job
        self._one_by_one = asyncio.Lock()
        trained = RunLayout(job.folder).weights
        if not trained.exists():
            raise RunError(f"{job.folder} has no trained weights yet (no {trained.name}/ folder)")
        base = resolve_model(job.config.model, job.config.seed, job.config.media)
        placement = LocalPlacement()
        tell("starting an engine")
        self._engine = await start_engine(job, placement, trained, job.config.steps, train=False, stage=tell)
        tell("starting the environment")
        self._rollout = placement.role("rollout", job.folder, self._heard)
        ready = self._expect(RolloutReady)
        await self._rollout.start(
            StartRollout(job.spec, job.agent, job.config, job.folder.name, job.folder, base, (self._engine.reach,), train=False)
        )
        async with _limit():
            await ready

    # ------------------------------------------------------------------------------------------------------ questions

    def evaluate(self, split: str, limit: int, tell: Tell) -> Evaluation:
        """Play a split greedily; the trajectories of the result are `RecordedTrajectory`.

        Raises:
            RunError: the rollout process failed, or no episode ended for ten minutes.
        """

        async def ask() -> Evaluated:
            async with self._one_by_one:
                answer = self._expect(Evaluated)
                self._rollout.send(Evaluate(self._job.config.steps, split, limit))
                async with _limit() as clock:
                    self._told, self._limit = tell, clock
                    try:
                        return await answer
                    finally:
                        self._told, self._limit = silent, None

        done = self._thread.submit(ask()).result()
        layout = RunLayout(self._job.folder)
        return replace(
            done.result, trajectories=Trajectories(recorded(t, None, layout, "eval") for t in done.result.trajectories)
        )

    def generate(self, messages: list[Message], sampling: SamplingParams) -> AssistantMessage:
        """One answer.

        Raises:
            EngineError: the engine refused or failed.
            RunError: the rollout process failed, or did not answer in ten minutes.
        """

        async def ask() -> AssistantMessage:
            number = next(self._numbers)
            answer = self._expect((ChatDone, number))
            self._rollout.send(Chat(number, tuple(messages), sampling))
            async with _limit():
                done: ChatDone = await answer
            if done.message is None:
                raise EngineError(done.error or "no answer")
            return done.message

        return self._thread.submit(ask()).result()

    def close(self) -> None:
        """Stop the engine and the rollout process; questions under way end with an error."""

        async def stop() -> None:
            self._give_up("it was closed")
            for name in ("_rollout", "_engine"):
                process = getattr(self, name, None)
                if process is not None:
                    await process.stop()

        self._thread.submit(stop()).result()
        self._thread.close()

    # -------------------------------------------------------------------------------------------------------- answers

    def _expect(self, key: Hashable) -> asyncio.Future[Any]:
        """What a message will be put into.

        Raises:
            RunError: nothing answers any more.
        """
        if self._lost is not None:
            raise self._lost
        answer = self._waiting[key] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._waiting.pop(key, None))
        return answer

    def _heard(self, message: Any) -> None:
        """A message of the rollout process."""
        if isinstance(message, Failed):
            self._give_up(message.text)
        elif isinstance(message, Died):
            self._dying = asyncio.create_task(self._died())
        elif isinstance(message, Evaluating):
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(asyncio.get_running_loop().time() + ANSWER_SECONDS)
            self._told(str(message.played))
        else:
            key = (ChatDone, message.id) if isinstance(message, ChatDone) else type(message)
            answer = self._waiting.get(key)
            if answer is not None and not answer.done():
                answer.set_result(message)

    async def _died(self) -> None:
        self._give_up(await self._rollout.log_tail())

    def _give_up(self, why: str) -> None:
        self._lost = RunError(f"the rollout process failed: {why}")
        for answer in list(self._waiting.values()):
            if not answer.done():
                answer.set_exception(self._lost)


@contextlib.asynccontextmanager
async def _limit() -> AsyncIterator[asyncio.Timeout]:
    """How long an answer may take.

    Raises:
        RunError: it took longer.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS) as limit:
            yield limit
    except TimeoutError:
        raise RunError(f"no answer within {ANSWER_SECONDS:.0f} s") from None
