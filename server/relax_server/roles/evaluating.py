"""An evaluation in a folder of its own: with an engine that is started for it, or with an endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from relax_sdk.errors import ConfigError
from relax_sdk.evals.plan import EvalPlan
from relax_sdk.evals.play import EvalResults
from relax_sdk.evals.report import finite_data, score_episodes
from relax_sdk.evals.senses import SensesResults, judge
from relax_sdk.evaluation import Played
from relax_sdk.media import MediaStore
from relax_sdk.run import EVENTS
from relax_sdk.runtime import Job, Tell
from relax_sdk.session import Agent
from relax_server.engines.coalesce import CoalescingEngine
from relax_server.engines.kinds import connect
from relax_server.gateway.agent.gateway import AgentGateway
from relax_server.journal import open_journal
from relax_server.journal.base import Journal
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.roles.events import EventLog, RunEvent
from relax_server.roles.layout import RunLayout
from relax_server.roles.placement import LocalPlacement
from relax_server.roles.slot import start_engine
from relax_server.rollout.endpoint import endpoint_evaluator
from relax_server.rollout.eval_plan import play_plan
from relax_server.rollout.evaluation import Evaluator
from relax_server.rollout.pool import EnginePool
from relax_server.rollout.senses import play_senses
from relax_server.rollout.threads import CallThreads
from relax_server.rollout.worker import RolloutWorker


async def play_evaluation(job: Job, plan: EvalPlan, tell: Tell, on_played: Callable[[Played], None]) -> EvalResults:
    """Play what the job's folder does not hold yet.

    Args:
        job: environment, settings, agent and the folder.
        plan: what is played.
        tell: told of every stage of the start.
        on_played: told after each task how far it is.

    Raises:
        ConfigError: environment, model and settings do not fit together.
        EngineError: the engine did not start.
        JournalError: the journal cannot be read or written.
    """
    with _noted(job, plan, f"evaluation of {job.spec.id} [{plan.split}]") as log:
        async with _opened(job, plan, tell) as (evaluator, journal):
            results = await play_plan(evaluator, journal, job.config, plan, on_played)
        scores = score_episodes(results.episodes, plan.success)
        counted = {"eval_reward": scores.reward.mean, "eval_ci95": scores.reward.ci95, "eval_n": scores.reward.n}
        if scores.reward.n:
            row = {"step": plan.version, "time": time.time()} | counted
            with RunLayout(job.folder).metrics.open("a") as file:
                file.write(json.dumps(finite_data(row)) + "\n")
        failed = sum(scores.failures.values())
        log.add(RunEvent("evaluation", f"reward {scores.reward} over {scores.tasks} tasks, {failed} failed", plan.version))
    return results


async def check_senses(job: Job, plan: EvalPlan, model: str, tell: Tell) -> SensesResults:
    """Play the passes of the blindness check; the arguments and errors are those of `play_evaluation` and `play_senses`."""
    with _noted(job, plan, f"senses of {model} in {job.spec.id} [{plan.split}]") as log:
        async with _opened(job, plan, tell) as (evaluator, _):
            results = await play_senses(evaluator, job.config, plan, model, tell)
        for kind, verdict in judge(results).verdicts.items():
            log.add(RunEvent("finding", f"{kind}: {verdict.what}", plan.version, verdict.level, verdict.advice))
    return results


@contextlib.contextmanager
def _noted(job: Job, plan: EvalPlan, what: str) -> Iterator[EventLog]:
    """Note beginning and end in the folder, as runs do, so that a viewer can tell how an evaluation stands."""
    log = EventLog(job.folder / EVENTS)
    try:
        log.add(RunEvent("started", what, plan.version))
        try:
            yield log
        except asyncio.CancelledError:
            log.add(RunEvent("stopped", "stopped; the same command goes on", plan.version))
            raise
        except Exception as error:
            log.add(RunEvent("failed", f"{type(error).__name__}: {error}", plan.version, "problem"))
            raise
        log.add(RunEvent("ended", what, plan.version))
    finally:
        log.close()


@contextlib.asynccontextmanager
async def _opened(job: Job, plan: EvalPlan, tell: Tell) -> AsyncIterator[tuple[Evaluator, Journal]]:
    """What plays, and the journal that it commits to."""
    journal = open_journal(RunLayout(job.folder).journal)
    try:
        open_evaluator = _with_engine if plan.endpoint is None else _with_endpoint
        async with open_evaluator(job, plan, journal, tell) as evaluator:
            yield evaluator, journal
    finally:
        journal.close()


@contextlib.asynccontextmanager
async def _with_endpoint(job: Job, plan: EvalPlan, journal: Journal, tell: Tell) -> AsyncIterator[Evaluator]:
    agent, endpoint = job.agent, plan.endpoint
    assert endpoint is not None
    if agent is not None and not callable(agent):
        raise ConfigError(f"the agent {agent!r} is a program of its own, which needs an engine: it cannot play with a URL")
    store = MediaStore(RunLayout(job.folder).media)
    async with endpoint_evaluator(job.spec, job.config, endpoint, job.folder.name, agent, journal, store) as evaluator:
        yield evaluator


@contextlib.asynccontextmanager
async def _with_engine(job: Job, plan: EvalPlan, journal: Journal, tell: Tell) -> AsyncIterator[Evaluator]:
    """Start an engine with the plan's weights, and what plays with it."""
    config = job.config
    base = resolve_model(config.model, config.seed, config.media)
    store, processor = MediaStore(RunLayout(job.folder).media), Processor.load(base)
    async with contextlib.AsyncExitStack() as stack:
        agent: Agent | None = None
        if callable(job.agent):
            agent = job.agent
        elif isinstance(job.agent, (str, Sequence)):
            gateway = AgentGateway(job.agent, processor, store, CallThreads("agent media", 2), config.rollout.fork_agents)
            stack.push_async_callback(gateway.close)
            agent = gateway.play
        tell("starting an engine")
        slot = await start_engine(job, LocalPlacement(), plan.weights or base, plan.version, train=False, stage=tell)
        stack.push_async_callback(slot.stop)
        tell("starting the environment")
        engine = CoalescingEngine(connect(slot.reach, store.root, base))
        stack.push_async_callback(engine.close)  # a pool leaves its engines as they are
        pool = EnginePool([engine])
        stack.push_async_callback(pool.close)
        worker = RolloutWorker(job.spec, config, processor, pool, store, journal, job.folder.name, agent)
        stack.push_async_callback(worker.close)
        yield worker.evaluator
