"""The format warm-up: episodes played with random actions of the right form, for the trainer to imitate.

A randomly initialised model emits noise, so that no group would ever hold a reward. The environment's `format_example`
answers in place of the model; it knows nothing about the task, so the episodes say how an action looks and not which one pays.
Nothing of it is scored: no reward function is called, no judge is asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Sequence

from relax_sdk.errors import ConfigError, RunError
from relax_sdk.trajectory import Group, Trajectory, derive_seed
from relax_server.rollout.episode import USABLE, Episode
from relax_server.rollout.failed_attempts import Failures
from relax_server.rollout.group import GroupResult
from relax_server.rollout.policy import ExamplePolicies
from relax_server.rollout.stats import Tally
from relax_server.rollout.task import EpisodeTask
from relax_server.rollout.worker import RolloutWorker

MOST_ROWS = 256
"""Different tasks the warm-up shows; their answers are not in it."""


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
        RunError: too many attempts failed, see `FailureLimits`.
        JournalError: a batch, or failed attempts, cannot be written.
    """
    rows = await worker.first_rows(min(groups * batch_size, MOST_ROWS))
    policies = ExamplePolicies(worker.policies.renderer, worker.policies.intake)
    seen = worker.context.tally
    context = dataclasses.replace(
        worker.context,
        agent=worker.warmup_agent,
        policies=policies,
        scored=False,
        tally=Tally(failures=seen.failures, errors=seen.errors),
    )
    worker.warmup_episodes = groups * batch_size
    failures, env = Failures(worker.config.rollout, worker.failed_attempts), worker.spec.id
    for number in range(groups):
        group_id, run_seed = f"{worker.run_name}/warmup/{number}", worker.config.seed
        episodes = []
        for i in range(batch_size):
            index = number * batch_size + i
            seed = derive_seed(run_seed, "warmup", index)
            row = rows[index % len(rows)]
            task = EpisodeTask("warmup", index, row, group_id, i, batch_size, seed, run_seed, worker.config.sampling)
            episodes.append(Episode(context, task))
        result = _result(group_id, env, number, await _played(worker, episodes))
        why = await failures.ended(env, result, result.group)
        if result.group is None:
            raise ConfigError(f"the format warm-up had no usable episode: {seen.errors[-1]}")
        await worker.commit(result.group, "warmup")
        if why is not None:
            raise RunError(f"the format warm-up: {why}. Mend the environment and resume the run")
    return groups


def _result(group_id: str, env: str, number: int, played: Sequence[Trajectory]) -> GroupResult:
    """What became of a batch: only what is usable is imitated."""
    usable, failed = [t for t in played if t.status in USABLE], [t for t in played if t.failure is not None]
    group = Group(group_id, env, number, usable) if usable else None
    causes = Counter(t.failure for t in failed if t.failure is not None)
    return GroupResult(group, list(played), causes, failed[-1].error if failed else None, failed)


async def _played(worker: RolloutWorker, episodes: Sequence[Episode]) -> list[Trajectory]:
    """Play episodes, and count them as they end; they are cancelled with it."""

    def count(ended: object) -> None:
        worker.warmup_played += 1

    results = [episode.launch() for episode in episodes]
    for result in results:
        result.add_done_callback(count)
    try:
        return list(await asyncio.gather(*results))
    except BaseException:
        for episode in episodes:
            episode.cancel()
        raise
