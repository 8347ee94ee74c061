"""Episodes with a policy behind any OpenAI-compatible URL: no token ids, so for evaluation only."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from relax_sdk.config import RunConfig
from relax_sdk.endpoint import Endpoint, EndpointEvaluation
from relax_sdk.errors import ConfigError, EpisodeError, RunError
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.registry import EnvSpec
from relax_sdk.tasks import task_splits
from relax_sdk.trajectory import Turn
from relax_server.engines.openai import ChatClient, parameters
from relax_server.rollout.calls import Answer, CallOptions
from relax_server.rollout.context import EpisodeTask, RolloutContext, default_agent
from relax_server.rollout.evaluation import OnPlayed, Tally, summarise
from relax_server.rollout.group import GroupResult, GroupTask, play_group
from relax_server.rollout.pool import EnginePool
from relax_server.rollout.session import EpisodeSession, State
from relax_server.rollout.threads import CallThreads

THREADS = 64
"""In which environments run."""

ROW_TIMEOUT = 60.0


class ChatSession(EpisodeSession):
    """A session whose turns are messages: their token ids are unknown, and empty in the trajectory.

    Args:
        context: shared by all episodes.
        task: what to play.
        enter: told of every new state.
        client: asks the policy.
    """

    def __init__(self, context: RolloutContext, task: EpisodeTask, enter: Callable[[State], None], client: ChatClient) -> None:
        super().__init__(context, task, enter)
        self.extra_info["tokens"] = f"unknown: played with {client.endpoint.model} at {client.endpoint.url}"
        self._client = client
        self._answers: list[Turn] = []

    @property
    def turns(self) -> list[Turn]:
        """So far."""
        return self._answers

    def _make_recorder(self) -> None:
        """There are no tokens to record."""

    async def call(self, messages: Sequence[Message], options: CallOptions | None = None) -> Answer:
        """Not to be had: its answer would be tokens."""
        raise EpisodeError("an agent that asks for tokens cannot be evaluated behind an OpenAI-compatible URL")

    async def _ask(self, messages: Sequence[Message]) -> AssistantMessage:
        await self._require_open()
        config = self.context.config
        if len(self.turns) >= config.max_turns:
            raise self._end(f"the episode has reached max_turns = {config.max_turns}")
        started = time.monotonic()
        try:
            sampling = self.task.sampling_at(len(self.turns), config.max_tokens)
            answer = await self._client.ask(messages, self.tools, sampling, config.turn_timeout)
        finally:
            self.timings["generate"] += time.monotonic() - started
        media = [item.ref for message in messages for item in message.media]
        turn = Turn([], [], [], finish_reason=answer.finish_reason, media=media, engine=self._client.endpoint.url)
        turn.seconds = time.monotonic() - started
        self._answers.append(turn)
        self.messages = [*messages, answer]
        return answer

    async def _stored(self, messages: Sequence[Message]) -> list[Message]:
        """They keep their bytes: there is no store, and no history is kept."""
        return list(messages)


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
        results = await _play(context, tasks, Tally(n, on_played))
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


async def _play(context: RolloutContext, tasks: Sequence[GroupTask], tally: Tally) -> list[GroupResult]:
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
    """What the episodes share; there are no tokens, so nothing that makes or keeps them."""
    gate = asyncio.Event()
    gate.set()
    env_class = spec.load()
    nothing = cast(Any, None)
    return RolloutContext(
        run=client.endpoint.model,
        spec=spec,
        env_class=env_class,
        config=config.rollout,
        agent=default_agent(env_class),
        renderer=nothing,
        intake=nothing,
        pool=EnginePool([]),
        threads=threads,
        slots=asyncio.Semaphore(min(config.rollout.concurrency, client.endpoint.concurrency)),
        gate=gate,
        tokens=False,
        make_session=lambda context, task, enter: ChatSession(context, task, enter, client),
    )
