"""Evaluation of a model behind any OpenAI-compatible URL, without tokens, weights or a journal."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from relax_sdk.config import RunConfig
from relax_sdk.endpoint import Endpoint, EndpointEvaluation
from relax_sdk.errors import ConfigError, RunError
from relax_sdk.registry import EnvSpec
from relax_sdk.tasks import task_splits
from relax_server.engines.openai import ChatClient, parameters
from relax_server.rollout.context import RolloutContext, default_agent
from relax_server.rollout.evaluation import EvalTally, OnPlayed, summarise
from relax_server.rollout.group import GroupResult, GroupTask, play_group
from relax_server.rollout.policy import MessagePolicies
from relax_server.rollout.threads import CallThreads

THREADS = 64
"""Threads that environments run in, at most."""

ROW_TIMEOUT = 60.0


async def evaluate_endpoint(
    spec: EnvSpec,
    config: RunConfig,
    endpoint: Endpoint,
    split: str = "eval",
    limit: int | None = None,
    on_played: OnPlayed | None = None,
) -> EndpointEvaluation:
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
    splits = task_splits(spec.load_tasks())
    if split not in splits:
        raise ConfigError(f"{spec.id} has no {split!r} split; there are {', '.join(splits)}")
    sampling = replace(config.sampling, temperature=0.0)
    parameters(sampling)
    rows, n = splits[split], limit or config.eval.limit
    if rows.finite:
        n = min(n, len(rows))
    client, threads = ChatClient(endpoint), CallThreads("environment", THREADS)

    def task(index: int, row: dict[str, Any]) -> GroupTask:
        group = f"{endpoint.model}/{split}/{index}"
        rollout = config.rollout
        policy = "retry_then_count" if rollout.on_failure == "retry" else "count"
        return GroupTask(group, split, index, row, 1, config.seed, sampling, policy, rollout.max_retries)

    try:
        context = _context(spec, config, client, threads)
        tasks = [task(index, await threads.call(rows.row, index, limit=ROW_TIMEOUT)) for index in range(n)]
        results = await _play(context, tasks, EvalTally(n, on_played))
    finally:
        await client.close()
        threads.close()
    if all(result.group is None for result in results):
        last = results[-1].error if results else "no tasks"
        raise RunError(
            f"evaluation of {spec.id} with {endpoint.model}: none of {n} episodes was usable; the last failure: {last}"
        )
    failures = Counter(next(reversed(r.failures), "no answer") for r in results if r.group is None)
    found = summarise([result.trajectories[0] for result in results], failures)
    return EndpointEvaluation(
        found.mean_reward, found.ci95, found.n, found.components, found.failures, trajectories=found.trajectories
    )


async def _play(context: RolloutContext, tasks: Sequence[GroupTask], tally: EvalTally) -> list[GroupResult]:
    async def one(task: GroupTask) -> GroupResult:
        result = await play_group(context, task)
        tally.count(result)
        return result

    playing = [asyncio.create_task(one(task)) for task in tasks]
    try:
        return list(await asyncio.gather(*playing))
    finally:
        for episode in playing:
            episode.cancel()


def _context(spec: EnvSpec, config: RunConfig, client: ChatClient, threads: CallThreads) -> RolloutContext:
    env_class = spec.load()
    return RolloutContext(
        run=client.endpoint.model,
        spec=spec,
        env_class=env_class,
        config=config.rollout,
        agent=default_agent(env_class),
        policies=MessagePolicies(client),
        threads=threads,
        slots=asyncio.Semaphore(min(config.rollout.concurrency, client.endpoint.concurrency)),
    )
