"""A group: one task played `group_size` times; it always finishes, by the failure policy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from relax_sdk.config import SamplingParams
from relax_sdk.errors import EpisodeTimeout, RewardError
from relax_sdk.messages import Message
from relax_sdk.rewards import score_group
from relax_sdk.trajectory import Group, Trajectory, derive_seed
from relax_server.rollout.context import RolloutContext
from relax_server.rollout.environment import named_error
from relax_server.rollout.episode import GRACE, USABLE, Episode
from relax_server.rollout.lenses import Lens
from relax_server.rollout.task import EpisodeTask


@dataclass(frozen=True)
class GroupTask:
    """One group to play."""

    id: str
    """Deterministic, so that committing the group again after a restart changes nothing."""
    split: str
    task_index: int
    row: dict[str, Any]
    size: int
    seed: int
    """Seed of the run; the group's environments get one that is derived from it, and so does every answer."""
    sampling: SamplingParams
    on_failure: Literal["retry", "retry_then_count", "count", "drop"]
    """As `RolloutConfig.on_failure`; `retry_then_count` keeps an episode that failed every time, without a reward."""
    max_retries: int
    lens: Lens | None = None
    """Changes what the policies are shown; None: nothing."""

    def episode(self, index: int, attempt: int) -> EpisodeTask:
        """The episode at a position of the group. All positions, and all attempts, have the environment's seed in common."""
        return EpisodeTask(
            split=self.split,
            task_index=self.task_index,
            row=self.row,
            group_id=self.id,
            group_index=index,
            group_size=self.size,
            seed=derive_seed(self.seed, self.split, self.task_index),
            run_seed=self.seed,
            sampling=self.sampling,
            attempt=attempt,
            lens=self.lens,
        )


@dataclass
class GroupResult:
    """What became of a group."""

    group: Group | None
    """None when nothing usable remains: no episode was completed or truncated with a response in it, or the group rewards
    failed."""
    trajectories: list[Trajectory]
    """The last attempt of every position, dropped ones included."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed attempts by the name of their error."""
    error: str | None = None
    """The last failure in words."""
    failed: list[Trajectory] = field(default_factory=list)
    """Every attempt that failed, those included that were tried again, in the order in which they ended."""

    def failed_beside(self, group: Group | None) -> list[Trajectory]:
        """The failed attempts that are not in a group of these episodes."""
        inside = {id(trajectory) for trajectory in group.trajectories} if group is not None else set()
        return [trajectory for trajectory in self.failed if id(trajectory) not in inside]


AT_ONCE = 16
"""Episodes of a group that are begun, or cancelled, without letting the event loop do something else in between."""
QUEUED = 64
"""Episodes of a group that wait for a place at once; the others are made when these have one."""


class _Play:
    """The episodes of one group while they are being played."""

    def __init__(self, context: RolloutContext, task: GroupTask) -> None:
        self.context = context
        self.task = task
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.last: dict[int, Trajectory] = {}
        self.first: list[Sequence[Message]] = []
        """What was shown first, by each attempt that came so far."""
        self.kept: dict[int, Trajectory] = {}
        self.failures: Counter[str] = Counter()
        self.failed: list[Trajectory] = []
        self.error: str | None = None
        self.live: dict[int, Episode] = {}
        self.scorer: Episode | None = None
        """Its environment computes the group rewards."""
        self.cancelled = False
        self._queue = asyncio.Semaphore(QUEUED)
        self._beginning = True
        """Not all episodes have begun."""

    async def begin(self) -> None:
        """Launch all episodes, some at a time, as those before them get places."""
        try:
            for first in range(0, self.task.size, AT_ONCE):
                indices = range(first, min(first + AT_ONCE, self.task.size))
                for _ in indices:
                    await self._queue.acquire()
                async with self.context.turn:
                    for index in indices:
                        self.launch(index, 1, self._queue.release)
                    if first + AT_ONCE < self.task.size:
                        await asyncio.sleep(0)
        finally:
            self._beginning = False
            self._end_if_over()

    def launch(self, index: int, attempt: int, queued: Callable[[], None] | None = None) -> None:
        episode = Episode(self.context, self.task.episode(index, attempt))
        self.live[index] = episode
        episode.launch(queued).add_done_callback(lambda result: self._ended(index, episode, result.result()))

    def cancel(self) -> None:
        """Cancel all episodes, some at a time: in a task of its own, which goes on when this one is cancelled again."""
        self.cancelled = True
        self.context.spawn(self._cancel(list(self.live.values())))

    async def _cancel(self, episodes: Sequence[Episode]) -> None:
        for first in range(0, len(episodes), AT_ONCE):
            async with self.context.turn:
                for episode in episodes[first : first + AT_ONCE]:
                    episode.cancel()
                await asyncio.sleep(0)

    def _ended(self, index: int, episode: Episode, trajectory: Trajectory) -> None:
        del self.live[index]
        self.last[index] = trajectory
        if episode.session.first is not None:
            self.first.append(episode.session.first)
        if trajectory.status in USABLE:
            self.kept[index] = trajectory
            self._keep_open(episode)
        elif not self.cancelled:
            self.failures[type(episode.error).__name__] += 1
            self.failed.append(trajectory)
            self.error = trajectory.error
            policy, again = self.task.on_failure, trajectory.attempts <= self.task.max_retries
            if policy in ("retry", "retry_then_count") and again:
                self.launch(index, trajectory.attempts + 1)
            elif policy in ("count", "retry_then_count"):
                self.kept[index] = trajectory
        self._end_if_over()

    def _end_if_over(self) -> None:
        if not self._beginning and not self.live and not self.done.done():
            self.done.set_result(None)

    def _keep_open(self, episode: Episode) -> None:
        if self.scorer is None:
            self.scorer = episode
        elif episode.has_group_rewards:
            self.context.spawn(episode.close())


async def play_group(context: RolloutContext, task: GroupTask) -> GroupResult:
    """Play a task `task.size` times and score the group.

    It ends whatever the environment does: an episode that fails is retried, kept or dropped, one that hangs times out.
    Cancelling it cancels its episodes, and waits for those that heed it.
    """
    play = _Play(context, task)
    try:
        await play.begin()
        await asyncio.shield(play.done)
    except asyncio.CancelledError:
        play.cancel()
        await asyncio.wait({play.done}, timeout=GRACE)
        raise
    finally:
        context.policies.release(task.id)
    if not _alike(play.first):
        context.tally.unlike_groups += 1
    kept = [play.kept[index] for index in sorted(play.kept)]
    result = GroupResult(None, [play.last[i] for i in sorted(play.last)], play.failures, play.error, play.failed)
    usable = any(t.status in USABLE and context.policies.answered(t) for t in kept)
    if usable and await _score(play, kept, result):
        result.group = Group(task.id, context.spec.id, task.task_index, kept)
    return result


def _alike(first: Sequence[Sequence[Message]]) -> bool:
    """Whether all episodes of a group were shown the same at first."""
    shown = ([message.to_openai() for message in messages] for messages in first)
    one = next(shown, None)
    return all(other == one for other in shown)


async def _score(play: _Play, kept: list[Trajectory], result: GroupResult) -> bool:
    """Add the group rewards; False when they failed."""
    scorer = play.scorer
    assert scorer is not None
    if not scorer.has_group_rewards:
        return True
    scored = [t for t in kept if t.status in USABLE]
    before = [replace(t, rewards=dict(t.rewards)) for t in scored]
    limit = play.context.config.score_timeout

    async def invoke(function: Any, *arguments: Any) -> Any:
        return await scorer.session.runner.invoke(function, *arguments, limit=limit)

    try:
        await score_group(scorer.session.env, scored, invoke)
    except (RewardError, EpisodeTimeout, TypeError) as error:
        where = f"{play.context.spec.id}, {play.task.split} task {play.task.task_index}, group reward"
        named = named_error(where, error, RewardError if isinstance(error, TypeError) else type(error))
        play.context.tally.fail(named)
        result.failures[type(named).__name__] += 1
        result.error = str(named)
        for trajectory, old in zip(scored, before, strict=True):
            trajectory.reward, trajectory.rewards = old.reward, old.rewards
        return False
    finally:
        await scorer.close()
    return True
