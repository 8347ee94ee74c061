"""`relax replay --episode`: the record and the weights of one episode found in a run's folder, and played again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from relax_sdk.errors import ConfigError, RunError
from relax_sdk.media import MediaStore
from relax_sdk.origin import AgentLike
from relax_sdk.recorded import RecordedTrajectory
from relax_sdk.replay import EpisodeReplay
from relax_sdk.runtime import Job, Tell
from relax_sdk.session import Agent
from relax_sdk.tasks import TaskSplit, task_splits
from relax_sdk.trajectory import Trajectory
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.roles.layout import RunLayout
from relax_server.roles.looking import read_episode
from relax_server.roles.placement import LocalPlacement
from relax_server.roles.slot import start_engine
from relax_server.rollout.failed_attempts import FAILED
from relax_server.rollout.replay import by_messages, compare, play_again, sample_again
from relax_server.rollout.task import EpisodeTask


async def replay_episode(job: Job, episode: str, model: str | None, tell: Tell) -> EpisodeReplay:
    """Play an episode of a run again.

    Args and raises: as `relax_sdk.replay.replay_episode`'s.
    """
    config, layout = job.config, RunLayout(job.folder)
    recorded = read_episode(config, layout, episode)
    if recorded.split == "warmup":
        raise ConfigError(f"{recorded.id}: no policy answered in the format warm-up, so there is nothing to play again")
    tokenless = by_messages(recorded)
    if recorded.failure is None and not tokenless and not any(turn.response_ids for turn in recorded.turns):
        raise ConfigError(f"{recorded.id}: no tokens of answers are recorded ({recorded.error or recorded.status})")
    if tokenless and model is not None:
        raise ConfigError(
            f"{recorded.id}: it was played behind a URL that tells no tokens, so none can be compared; no --model"
        )
    agent = require_function(job.agent, recorded.id)
    tell("playing the environment")
    processor = None if tokenless else Processor.load(resolve_model(config.model, config.seed, config.media))
    task = task_of(job, recorded, task_splits(job.spec.load_tasks()))
    now, group_rewards = await play_again(job.spec, config, processor, agent, recorded, task)
    differences, notes, tokens = compare(recorded, now, processor, group_rewards), [], None
    if group_rewards:
        notes.append("rewards that compare the members of a group are not computed for one alone")
    if recorded.failure is not None and not differences:
        notes.append(f"it fails as it did: {now.error or now.failure}")
    if processor is None:
        notes.append("it was played behind a URL that tells no tokens, so none are compared")
    if model is not None and processor is not None:
        weights, version = weights_of(job, recorded, model)
        played_with = sorted({span.version for turn in recorded.turns for span in turn.weight_versions})
        if version is None or played_with != [version]:
            notes.append(
                f"it was played with the weights of version {', '.join(map(str, played_with))}, and the model is "
                f"{weights if version is None else f'version {version} of the run'}: other tokens are to be expected"
            )
        tell("starting an engine")
        slot = await start_engine(job, LocalPlacement(), weights, version or 0, train=False, stage=tell)
        try:
            tell("sampling again")
            store = MediaStore(layout.media)
            tokens, difference, more = await sample_again(slot.client, recorded, processor, store, config.rollout.turn_timeout)
        finally:
            await slot.stop()
        notes += more
        differences += [difference] if difference is not None else []
    return EpisodeReplay(
        recorded.id,
        recorded.env,
        recorded.task_index,
        recorded.seed,
        len(recorded.turns),
        tuple(differences),
        tuple(notes),
        tokens,
    )


def require_function(agent: AgentLike, what: str) -> Agent | None:
    """An agent that can play again, None for the built-in loops.

    Args:
        agent: of the run.
        what: was played by it.

    Raises:
        ConfigError: the agent is a command.
    """
    if agent is None or callable(agent):
        return agent
    raise ConfigError(f"{what} was played by a program of its own ({agent}); agents that are functions can play again")


def task_of(job: Job, recorded: RecordedTrajectory, splits: Mapping[str, TaskSplit]) -> EpisodeTask:
    """The task of a record, its row read anew.

    Args:
        job: names the run and its sampling.
        recorded: the record.
        splits: of the environment's tasks.

    Raises:
        ConfigError: the environment no longer has the split.
    """
    split = recorded.split
    if split in ("eval", FAILED):  # in the journal all evaluations are one, and all failed attempts; the id tells
        split = recorded.id.removeprefix(f"{job.folder.name}/").partition("/")[0]
    if split not in splits:
        raise ConfigError(f"{recorded.id}: {job.spec.id} has no split {split!r} any more; there are {', '.join(splits)}")
    row = splits[split].row(recorded.task_index)
    position, seeds = (recorded.group_id, recorded.group_index, recorded.group_size), (recorded.seed, job.config.seed)
    return EpisodeTask(split, recorded.task_index, row, *position, *seeds, job.config.sampling, recorded.attempts)


def weights_of(job: Job, recorded: Trajectory, model: str) -> tuple[Path, int | None]:
    """The folder of the weights to try, and their version, if it is one of the run's.

    A run keeps its last weights, those after the warm-up where a KL penalty compares with them, and those that it began with:
    its model.

    Raises:
        RunError: the run has no weights yet.
        ConfigError: not a model folder.
    """
    if model != "run":
        return resolve_model(model), None
    layout, config = RunLayout(job.folder), job.config
    kept: dict[int, Path] = {}
    if config.warmup.steps == 0:
        kept[0] = resolve_model(config.model, config.seed, config.media)
    elif layout.reference.exists():
        kept[0] = layout.reference
    if layout.weights.exists():
        kept[_last_step(layout)] = layout.weights
    if not kept:
        raise RunError(f"{job.folder} has no weights yet; name a folder with --model, or leave it out")
    wanted = max((span.version for turn in recorded.turns for span in turn.weight_versions), default=0)
    version = wanted if wanted in kept else max(kept)
    return kept[version], version


def _last_step(layout: RunLayout) -> int:
    lines = layout.metrics.read_text().splitlines() if layout.metrics.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
