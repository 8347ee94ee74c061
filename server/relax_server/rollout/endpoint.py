"""Evaluation of a model behind any OpenAI-compatible URL, without tokens and weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

from relax_sdk.config import RunConfig
from relax_sdk.endpoint import Endpoint
from relax_sdk.evaluation import Evaluation
from relax_sdk.media import MediaStore
from relax_sdk.registry import EnvSpec
from relax_sdk.session import Agent
from relax_server.engines.openai import ChatClient, parameters
from relax_server.journal.base import Journal
from relax_server.rollout.commits import Committer
from relax_server.rollout.context import RolloutContext, default_agent, end_tasks
from relax_server.rollout.episode import GRACE
from relax_server.rollout.evaluation import Evaluator, OnPlayed
from relax_server.rollout.failed_attempts import FailedAttempts
from relax_server.rollout.policy import MessagePolicies
from relax_server.rollout.rows import TaskRows
from relax_server.rollout.threads import CallThreads

THREADS = 64
"""Threads that environments run in, at most."""


async def evaluate_endpoint(
    spec: EnvSpec,
    config: RunConfig,
    endpoint: Endpoint,
    split: str = "eval",
    limit: int | None = None,
    on_played: OnPlayed | None = None,
) -> Evaluation:
    """Play a split once, one episode a task, with temperature 0. Nothing is written.

    Args:
        spec: of the environment.
        config: its rollout and sampling settings are used.
        endpoint: the model.
        split: of the tasks.
        limit: tasks at most; default: `config.eval.limit`.
        on_played: told after each episode how far it is.

    Raises:
        ConfigError: there is no such split, or the sampling asks for what the OpenAI API has no word for.
        RunError: no episode was usable.
    """
    sampling = replace(config.sampling, temperature=0.0)
    async with endpoint_evaluator(spec, config, endpoint) as evaluator:
        tasks = await evaluator.tasks(split, limit or config.eval.limit, sampling, config.seed)
        return await evaluator.play(split, tasks, on_played)


@contextlib.asynccontextmanager
async def endpoint_evaluator(
    spec: EnvSpec,
    config: RunConfig,
    endpoint: Endpoint,
    run: str | None = None,
    agent: Agent | None = None,
    journal: Journal | None = None,
    store: MediaStore | None = None,
) -> AsyncIterator[Evaluator]:
    """What plays evaluations with an endpoint.

    Args:
        spec: of the environment.
        config: its rollout settings are used.
        endpoint: the model.
        run: name in the journal; default: the model's.
        agent: plays the episodes; default: the built-in loop for the environment.
        journal: groups go here; None: nowhere.
        store: media go here; None: nowhere.

    Raises:
        ConfigError: the sampling asks for what the OpenAI API has no word for, or the environment has no tasks.
    """
    parameters(config.sampling)
    env_class, run = spec.load(), run or endpoint.model
    client, threads = ChatClient(endpoint), CallThreads("environment", THREADS)
    committer = None if journal is None else Committer(journal, run)
    context: RolloutContext | None = None
    try:
        context = RolloutContext(
            run=run,
            spec=spec,
            env_class=env_class,
            config=config.rollout,
            agent=agent or default_agent(env_class),
            policies=MessagePolicies(client, store),
            threads=threads,
            slots=asyncio.Semaphore(min(config.rollout.concurrency, endpoint.concurrency)),
        )
        keep = config.rollout.keep_failed
        failed = None if committer is None else FailedAttempts.of_run(committer, keep)
        yield Evaluator(context, TaskRows(spec, threads), committer, failed=failed)
    finally:
        if context is not None:
            await end_tasks(context.tasks, GRACE)
        await client.close()
        if committer is not None:
            await committer.close()
        threads.close()
