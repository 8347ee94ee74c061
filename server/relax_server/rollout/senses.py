"""The passes of the blindness check: the same tasks again and again, with media taken away, each kind alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relax_sdk.config import RunConfig
from relax_sdk.evals.blank import is_blank
from relax_sdk.evals.plan import EvalPlan
from relax_sdk.evals.senses import ALL, SWAPS, Condition, SensePass, SensesResults, Shown, at_chance, donors_of
from relax_sdk.media import Media
from relax_sdk.runtime import Tell
from relax_sdk.trajectory import Trajectory, derive_seed
from relax_server.rollout.evaluation import Evaluator
from relax_server.rollout.group import GroupTask
from relax_server.rollout.lenses import Lens, Recording, another_task_s, blanked, exchanged

LOOK_SECONDS = 300.0
"""Seconds in which all media of a check are looked at."""


@dataclass
class _Check:
    """One check under way."""

    evaluator: Evaluator
    tasks: Sequence[GroupTask]
    plan: EvalPlan
    seed: int
    tell: Tell

    async def play(self, condition: Condition, kind: str, lens: Lens) -> SensePass:
        """One pass; its episodes are in the journal under the condition's name."""
        name = f"{condition} {kind}"
        slug = "".join(c if c.isalnum() else "-" for c in name)
        told: Callable[[Any], None] = lambda played: self.tell(f"{name}: {played}")
        tasks = [replace(task, lens=lens) for task in self.tasks]
        result = await self.evaluator.play(f"{self.plan.split}/{self.plan.version}-{slug}", tasks, told)
        counted = [t for t in result.trajectories if t.failure is None]
        rewards = {t.task_index: t.reward for t in counted}
        return SensePass(condition, kind, rewards, {t.task_index: answers(t) for t in counted}, result.failures)

    def donors(self, tasks: Sequence[int], condition: Condition) -> dict[int, int]:
        rng = np.random.default_rng(derive_seed(self.seed, "senses"))  # the same donors whether the text is theirs too or not
        return donors_of(tasks, condition, [tasks[i] for i in rng.permutation(len(tasks))])


async def play_senses(evaluator: Evaluator, config: RunConfig, plan: EvalPlan, model: str, tell: Tell) -> SensesResults:
    """Play the tasks of a plan as they are, then under each condition of the check.

    The environments are made, reset with the same seeds and scored as ever; only what the policy is shown is another.

    Args:
        evaluator: plays.
        config: its sampling and seed are used.
        plan: which tasks; its samples do not count.
        model: name of the model in the results.
        tell: told how far it is.

    Raises:
        ConfigError: there is no such split.
        RunError: no episode of a pass was usable.
        MediaError: media that are shown cannot be decoded.
    """
    tasks = await evaluator.tasks(plan.split, plan.limit, config.sampling, config.seed)
    check, seen = _Check(evaluator, tasks, plan, config.seed, tell), Recording()
    base = await check.play("as it is", ALL, seen)
    declared = sorted(evaluator.context.env_class.modalities)
    media = {kind: found for kind in ("audio", "image", "video") if (found := seen.media(kind))}
    threads = evaluator.context.threads
    shown = [await threads.call(look_at, kind, found, limit=LOOK_SECONDS) for kind, found in media.items()]
    results = SensesResults(evaluator.context.spec.id, model, plan.split, len(tasks), declared, shown, [base])
    if not media:
        return results
    passes, indices = results.passes, sorted(seen.shown)
    lens = another_task_s(seen.shown, check.donors(indices, "another task's"))
    passes.append(await check.play("another task's", ALL, lens))
    if len(media) > 1:
        passes.append(await check.play("blanked", ALL, blanked(media)))
    for kind, found in media.items():
        passes.append(await check.play("blanked", kind, blanked((kind,))))
        for condition in ("shuffled", *(SWAPS if at_chance(results) else SWAPS[:1])):
            donors = check.donors(list(found), condition)
            passes.append(await check.play(condition, kind, exchanged(kind, found, donors)))
    return results


def look_at(kind: str, media: dict[int, list[Media]]) -> Shown:
    """What an environment shows of one kind; decodes each different item.

    Raises:
        MediaError: an item cannot be decoded.
    """
    items = [part for parts in media.values() for part in parts]
    counts = Counter(part.ref.sha256 for part in items)
    different = {part.ref.sha256: part for part in items}
    empty = sum(counts[sha256] for sha256, part in different.items() if is_blank(part))
    return Shown(kind, len(media), len(items), empty, len(different))


def answers(trajectory: Trajectory) -> str:
    """What the policy said and called in an episode, as text to compare."""
    said = [message for message in trajectory.messages if message["role"] == "assistant"]
    return json.dumps([[m["content"], [call["function"] for call in m.get("tool_calls", ())]] for m in said])
