"""`relax replay` without an episode: recorded episodes played again with their answers, and scored by today's rewards."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_sdk.errors import ConfigError, RelaxError, RunError
from relax_sdk.media import MediaStore
from relax_sdk.recorded import RecordedTrajectory, TrajectoryFilter
from relax_sdk.rescoring import Rescored, ScoreChange, summarise
from relax_sdk.rewards import score_group
from relax_sdk.runtime import Job, Tell
from relax_sdk.tasks import TaskSplit, task_splits
from relax_sdk.trajectory import Trajectory
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.roles.layout import RunLayout
from relax_server.roles.looking import iter_groups, open_records, recorded
from relax_server.roles.replay import require_function, task_of
from relax_server.rollout.episode import USABLE, Episode
from relax_server.rollout.replay import ReplayStage, by_messages, recorded_answers, shown_otherwise
from relax_server.rollout.threads import CallThreads

THREADS = 8
EPISODES = 16
"""Episodes that are played at once."""
GROUPS = 8
"""Groups that are read at once."""


async def rescore(job: Job, wanted: TrajectoryFilter, movers: int, tell: Tell) -> Rescored:
    """Score recorded episodes again.

    Args and raises: as `relax_sdk.rescoring.rescore`'s.
    """
    config, layout = job.config, RunLayout(job.folder)
    agent = require_function(job.agent, f"{layout.folder.name}")
    processor: Processor | None = None
    threads, skipped = CallThreads("replay", THREADS), Counter[str]()
    scores: list[ScoreChange] = []
    examples: list[str] = []
    try:
        with open_records(config, layout) as journal:
            groups = iter_groups(journal, layout, wanted)
            splits = task_splits(job.spec.load_tasks())
            while some := list(itertools.islice(groups, GROUPS)):
                members = {g[0].group_id: _members(journal.fetch([g[0].group_id])[0].trajectories, g, layout) for g in some}
                if processor is None and not all(by_messages(t) for group in members.values() for t in group if t.turns):
                    processor = Processor.load(resolve_model(config.model, config.seed, config.media))
                with tempfile.TemporaryDirectory(prefix="relax-replay-") as folder:
                    slots, store = asyncio.Semaphore(EPISODES), MediaStore(Path(folder))
                    stage = ReplayStage(job.spec, config, processor, agent, threads, store, slots)
                    rescorer = _Rescorer(job, stage, splits, skipped, examples)
                    found = await asyncio.gather(*(rescorer.group(group, members[group[0].group_id]) for group in some))
                scores += [change for changes in found for change in changes]
                tell(f"{len(scores)} episodes")
    finally:
        threads.close()
    if not scores:
        why = "; ".join([*(f"{n} ({reason})" for reason, n in skipped.items()), *examples])
        raise ConfigError(f"{layout.folder.name} has no episode to score again{f': {why}' if why else ''}")
    return summarise(layout.folder.name, scores, movers, dict(skipped), examples)


def _members(group: Sequence[Trajectory], wanted: Sequence[RecordedTrajectory], layout: RunLayout) -> list[RecordedTrajectory]:
    """All members of a group that were scored, those that are wanted first: rewards of the group see all of them."""
    known = {t.id for t in wanted}
    others = [recorded(t, None, layout, wanted[0].split) for t in group if t.id not in known]
    return [*wanted, *others]


@dataclass(frozen=True)
class _Rescorer:
    """Scores groups again."""

    job: Job
    stage: ReplayStage
    splits: dict[str, TaskSplit]
    skipped: Counter[str]
    examples: list[str]
    """The first failure of each kind, in full."""

    async def group(self, wanted: Sequence[RecordedTrajectory], members: Sequence[RecordedTrajectory]) -> list[ScoreChange]:
        """The scores of the members that are wanted; the others are played only where rewards see the whole group."""
        scored = [t for t in wanted if self._was_scored(t)]
        if not scored:
            return []
        first, now = await self._play(scored[0])
        played = {scored[0].id: (first, now)}
        rest = members if first.has_group_rewards else scored
        others = [t for t in rest if t.id not in played and t.failure is None and t.turns and _can_play(t)]
        played |= dict(zip((t.id for t in others), await asyncio.gather(*map(self._play, others)), strict=True))
        try:
            usable = {id: now for id, (_, now) in played.items() if now.status in USABLE}
            if first.has_group_rewards and usable:
                await self._score_group(list(played.values()), list(usable.values()))
        except RelaxError as error:
            self._skip("a reward of the group failed", error, len(scored))
            return []
        finally:
            for episode, _ in played.values():
                await episode.close()
        for t in scored:
            if t.id not in usable:
                now = played[t.id][1]
                self._skip(f"played again they fail with {now.failure}", now.error)
        return [_change(t, usable[t.id]) for t in scored if t.id in usable]

    def _was_scored(self, t: RecordedTrajectory) -> bool:
        """Whether an episode has rewards to compare with; if not, it is counted."""
        why = None
        if t.split == "warmup":
            why = "examples of the format warm-up, which are not scored"
        elif t.failure is not None:
            why = f"failed: {t.failure}"
        elif not by_messages(t) and not any(turn.response_ids for turn in t.turns):
            why = "no tokens of answers are recorded"
        elif not _can_play(t):
            why = "played behind a URL, and not all answers are among their messages"
        if why is not None:
            self.skipped[why] += 1
        return why is None

    def _skip(self, why: str, example: object, n: int = 1) -> None:
        """Count episodes that cannot be scored again; the first of each kind is told in full."""
        if why not in self.skipped:
            self.examples.append(f"{why}: {example}")
        self.skipped[why] += n

    async def _play(self, t: RecordedTrajectory) -> tuple[Episode, Trajectory]:
        task = await self.stage.threads.call(task_of, self.job, t, self.splits, limit=self.stage.config.rollout.reset_timeout)
        episode = self.stage.episode(t, task)
        return episode, await episode.launch()

    async def _score_group(self, played: Sequence[tuple[Episode, Trajectory]], usable: Sequence[Trajectory]) -> None:
        scorer = next(episode for episode, now in played if now.status in USABLE)
        limit = self.stage.config.rollout.score_timeout
        ordered = sorted(usable, key=lambda t: t.group_index)

        async def invoke(function: Any, *arguments: Any) -> Any:
            return await scorer.session.runner.invoke(function, *arguments, limit=limit)

        await score_group(scorer.session.env, ordered, invoke)


def _can_play(t: RecordedTrajectory) -> bool:
    """Whether the record has the answers that are to be given again."""
    try:
        return not by_messages(t) or bool(recorded_answers(t))
    except RunError:
        return False


def _change(was: RecordedTrajectory, now: Trajectory) -> ScoreChange:
    return ScoreChange(was.id, was.reward, now.reward, was.rewards, now.rewards, not shown_otherwise(was, now))
