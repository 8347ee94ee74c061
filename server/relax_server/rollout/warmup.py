"""The format warm-up: episodes played with random actions of the right form, for the trainer to imitate.

A randomly initialised model emits noise, so that no group would ever hold a reward. The environment's `format_example`
answers in place of the model; it knows nothing about the task, so the episodes say how an action looks and not which one pays.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
from typing import Any

import numpy as np

from relax_sdk.env import Env
from relax_sdk.errors import ConfigError
from relax_sdk.messages import AssistantMessage, Text
from relax_sdk.session import Session
from relax_sdk.trajectory import Group, VersionSpan, derive_seed
from relax_server.engines.base import GenerateRequest, Generation
from relax_server.models.processor import Processor
from relax_server.rollout.context import EpisodeTask, Tally
from relax_server.rollout.episode import USABLE, Episode
from relax_server.rollout.pool import EnginePool
from relax_server.rollout.session import EpisodeSession
from relax_server.rollout.worker import RolloutWorker

MOST_ROWS = 256
"""Different tasks the warm-up shows; their answers are not in it."""

_session: contextvars.ContextVar[EpisodeSession] = contextvars.ContextVar("session")


class FormatExamples:
    """Answers like an engine, with the `format_example` of the environment of the episode that asks."""

    url = "format-examples"

    def __init__(self, processor: Processor, seed: int) -> None:
        self.processor = processor
        self.rng = np.random.default_rng(seed)

    async def generate(self, request: GenerateRequest, timeout: float) -> list[Generation]:
        env = _session.get().env
        assert isinstance(env, Env)
        action: Any = env.format_example(self.rng)
        if inspect.isawaitable(action):  # its code runs elsewhere
            action = await action
        if action is None:
            raise ConfigError(f"{type(env).__name__}.format_example gave no action in the middle of an episode")
        if isinstance(action, str):
            action = AssistantMessage(content=(Text(action),))
        ids = self.processor.encode_action(action)
        features = [
            self.processor.features(_session.get().context.intake.store.get(item.ref), item.ref.sha256, item.ref.kind)
            for item in request.media
        ]
        expanded = self.processor.expand(request.input_ids, features)
        return [Generation(expanded, ids, [0.0] * len(ids), [VersionSpan(0, 0, len(ids))], "stop")]

    async def abort(self, rid: str | None) -> None:
        """Nothing is ever in flight."""


async def make_warmup(worker: RolloutWorker, groups: int, batch_size: int) -> int:
    """Play episodes with random well-formed actions and commit them to the journal as split `warmup`.

    Args:
        worker: whose environment, tasks and journal are used; it must not have played yet.
        groups: batches to make.
        batch_size: episodes in each.

    Returns:
        Groups committed.

    Raises:
        ConfigError: no episode of a batch was usable; the message holds the last failure.
    """
    rows = worker.splits["train"].peek(min(groups * batch_size, MOST_ROWS))
    real = worker.context
    agent = worker.warmup_agent

    async def with_session(session: Session) -> None:
        assert isinstance(session, EpisodeSession)
        _session.set(session)
        await agent(session)

    engine = FormatExamples(worker.processor, derive_seed(worker.config.seed, "warmup"))
    pool = EnginePool([engine])  # type: ignore[list-item]
    context = dataclasses.replace(real, agent=with_session, pool=pool, tally=Tally(), routed_experts=False)
    try:
        for number in range(groups):
            group_id = f"{worker.run_name}/warmup/{number}"
            episodes = []
            for i in range(batch_size):
                index = number * batch_size + i
                seed = derive_seed(worker.config.seed, "warmup", index)
                row = rows[index % len(rows)]
                task = EpisodeTask("warmup", index, row, group_id, i, batch_size, seed, worker.config.sampling)
                episodes.append(Episode(context, task).launch())
            trajectories = [t for t in await asyncio.gather(*episodes) if t.status in USABLE]
            if not trajectories:
                raise ConfigError(f"the format warm-up had no usable episode: {context.tally.errors[-1]}")
            await worker.commit(Group(group_id, worker.spec.id, number, trajectories), "warmup")
    finally:
        await pool.close()
    return groups
