"""What a run's figures let one find: a table of small checks, each with its likely cause and the setting to change.

They are used while a run goes on (`relax_sdk.watch`) and afterwards (`relax_sdk.doctor`). A figure that a run does not report
is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean, median

from relax_sdk.config import RunConfig
from relax_sdk.findings import Finding
from relax_sdk.silence import WINDOW, Row, silence

WARM = 3
"""First steps whose times are not judged: caches are cold and the queue is empty."""
EVIDENCE = 16
"""Tasks beyond the first of each batch that must have looked alike before it is told that all do."""
FEW_TASKS = 4
"""One failing task among so many that were played is one of a few."""
FAILURES = 8
"""Failed attempts before it is judged which tasks they are from."""
RISEN = 0.25
"""Share of the span of rewards; a policy whose reward rose by it, and did not fall by it, is sure of something right."""
APART = 1e-3
"""Nats; a mean gap of logprobs of fresh samples above it, and above that of other modalities, is more than rounding."""
APART_ALONE = 0.05
"""The same where there are no other modalities to compare with; bfloat16 alone makes 0.01 to 0.02."""
FRESH_TOKENS = 64
"""Tokens of a modality from which its gap is judged: of a few, one token near a tie of experts would decide."""
NOT_ENVIRONMENT = frozenset({"generate", "queued", "total"})
"""Times of an episode that are not spent in the environment's code."""


@dataclass(frozen=True)
class RunFigures:
    """What is known of a run."""

    rows: Sequence[Row]
    """Metrics by step, oldest first, of the whole run."""
    config: RunConfig
    examples: bool | None = None
    """Whether the environment defines `format_example`; None: not known."""
    least: int = WINDOW
    """Fewer steps are not judged as to what they taught."""

    @cached_property
    def steps(self) -> list[Row]:
        """Rows of steps; a row that an evaluation alone has made is none."""
        return [row for row in self.rows if "n_groups" in row]

    @cached_property
    def recent(self) -> list[Row]:
        """The last steps, `WINDOW` at most; none while there are fewer than `least`."""
        return self.steps[-WINDOW:] if len(self.steps) >= self.least else []


Check = Callable[[RunFigures], Finding | None]


# -------------------------------------------------------------------------------------------------------------- the rewards


def nothing_learnt(run: RunFigures) -> Finding | None:
    """The last steps taught nothing; see `relax_sdk.silence`. Where the policy collapsed, that is why."""
    return None if collapse(run) is not None else silence(run.rows, run.config, run.examples, run.least)


def constant_component(run: RunFigures) -> Finding | None:
    """A reward component was the same in all episodes while another one moved. The environment's own steps need not pay."""
    spreads = [row.get("rewards_std", {}) for row in run.recent]
    names = [name for name in (spreads[0] if spreads else ()) if all(name in spread for spread in spreads)]
    moving = [name for name in names if any(spread[name] > 1e-9 for spread in spreads)]
    values = {name: [row["rewards"][name] for row in run.recent] for name in names}
    still = [name for name in names if name not in moving and name != "env" and max(values[name]) - min(values[name]) < 1e-9]
    if not still or not moving:
        return None
    name = still[0]
    return Finding(
        "problem",
        f"the reward component {name!r} was {values[name][0]:.3g} in every episode of the last {len(run.recent)} steps, while "
        f"{_quoted(moving)} moved: it teaches nothing",
        f"let {name!r} tell answers apart (look at what it reads of one, such as its case and spaces), or remove it",
    )


def held_out_falls(run: RunFigures) -> Finding | None:
    """The training reward rose while the held-out one fell by more than its uncertainty."""
    seen = [row for row in run.steps if "eval_reward" in row]
    if len(seen) < 3:
        return None
    best, last = max(seen[:-1], key=lambda row: row["eval_reward"]), seen[-1]
    doubt = best.get("eval_ci95", 0.0) + last.get("eval_ci95", 0.0)
    before, now = _reward_near(run.steps, best["step"]), _reward_near(run.steps, last["step"])
    if best["eval_reward"] - last["eval_reward"] <= max(doubt, 1e-9) or now <= before:
        return None
    return Finding(
        "problem",
        f"the held-out reward fell from {best['eval_reward']:.3f} at step {best['step']} to {last['eval_reward']:.3f} at step "
        f"{last['step']}, while the training reward rose from {before:.3f} to {now:.3f}",
        "give more different tasks, lower optimizer.lr or raise algorithm.kl_coef, as the tasks are learnt by heart or the "
        f"reward is exploited; the model of about step {best['step']} is the better one",
    )


def _reward_near(steps: Sequence[Row], step: int) -> float:
    """Mean training reward of the five steps up to one."""
    return _reward([row for row in steps if row["step"] <= step][-5:])


def _reward(steps: Sequence[Row]) -> float:
    return mean(row.get("reward", 0.0) for row in steps)


def collapse(run: RunFigures) -> Finding | None:
    """The policy has become sure within a few steps, and of the wrong thing."""
    last = run.steps[-5:]
    if len(last) < 5 or len(run.steps) < 6:
        return None
    groups = sum(row["n_groups"] for row in last)
    equal = sum(row.get("zero_variance_groups", 0) for row in last) / max(groups, 1)
    entropy, first = mean(row.get("entropy", 1.0) for row in last), max(row.get("entropy", 0.0) for row in run.steps[:2])
    if equal < 0.9 or entropy > 0.05 or first < 10 * entropy:
        return None
    began, best, now = mean(row["reward"] for row in run.steps[:2]), max(row["reward"] for row in run.steps), _reward(last)
    spread = max(row.get("reward_max", best) for row in run.steps) - min(row.get("reward_min", began) for row in run.steps)
    if now - began >= RISEN * spread and best - now <= RISEN * spread:
        return None  # it is sure, and rightly so
    before = f", which was {best:.3f} before" if best - now > RISEN * spread else ""
    return Finding(
        "problem",
        f"the policy has collapsed: its entropy fell from {first:.2f} to {entropy:.3f}, so all episodes of a group are "
        f"alike, and the reward is {now:.3f}{before}",
        f"lower optimizer.lr = {run.config.optimizer.lr:g}, or raise algorithm.kl_coef; begin the run anew",
    )


# ---------------------------------------------------------------------------------------------------------------- the tasks


def same_media(run: RunFigures) -> Finding | None:
    """All tasks show one and the same image, sound or film, in whole episodes."""
    rows = _of_several_tasks(run)
    for kind in rows[0].get("media_different", {}) if rows else ():
        if all(row.get("media_different", {}).get(kind) == 1 for row in rows):
            return Finding(
                "problem",
                f"the same {kind} was shown in all episodes of the last {len(rows)} steps, whatever the task was",
                f"make the {kind} in `reset` from options['task'] or self.np_random, not once in __init__ or in the module",
            )
    return None


def same_question(run: RunFigures) -> Finding | None:
    """All tasks of one turn begin with the same observation, so that no answer can fit more than one of them."""
    rows = _of_several_tasks(run)
    if not rows or any(row.get("observations") != 1 or row.get("turns_mean") != 1 for row in rows) or same_media(run):
        return None
    return Finding(
        "problem",
        f"all tasks of the last {len(rows)} steps began with the same observation, and their episodes have one turn",
        "let `reset` show what is in options['task'], or draw it from self.np_random after super().reset(seed=seed)",
    )


def _of_several_tasks(run: RunFigures) -> list[Row]:
    """The last steps that had several tasks each; none where they are too few to say that tasks look alike."""
    rows = [row for row in run.steps[-WINDOW:] if _tasks(row) > 1]
    return rows if sum(_tasks(row) - 1 for row in rows) >= EVIDENCE else []


def _tasks(row: Row) -> float:
    """Different tasks of a step."""
    return min(row["n_groups"], row.get("rollout_tasks") or row["n_groups"])


def few_tasks(run: RunFigures) -> Finding | None:
    """The run has so few tasks that a batch holds each of them several times."""
    tasks = run.steps[-1].get("rollout_tasks") if len(run.steps) >= 3 else None
    if not tasks or 2 * tasks > run.steps[-1]["n_groups"]:
        return None
    return Finding(
        "problem",
        f"there are only {tasks:.0f} training tasks for batches of {run.config.rollout.groups_per_step} groups: they will be "
        "learnt by heart",
        f"register more (tasks=…; hundreds are usual), or set rollout.groups_per_step to {tasks:.0f}",
    )


def failing_tasks(run: RunFigures) -> Finding | None:
    """A few of the tasks take most of the failed attempts."""
    last = next((row for row in reversed(run.steps) if row.get("rollout_failing_tasks")), None)
    if last is None or last["rollout_failed_attempts"] < FAILURES:
        return None
    worst, attempts, played = (last[f"rollout_{name}"] for name in ("failing_tasks", "failed_attempts", "tasks_played"))
    share = sum(count for _, count in worst) / attempts
    if share < 0.8 or played < FEW_TASKS * last["rollout_failing_tasks_total"]:
        return None
    named = ", ".join(f"{index} ({count})" for index, count in worst)
    return Finding(
        "problem",
        f"{share:.0%} of {attempts:.0f} failed attempts are of {len(worst)} of the {played:.0f} tasks played (row and "
        f"attempts: {named})",
        f"look at row {worst[0][0]} of the tasks and at logs/rollout.log, and mend or leave out what these rows have in common",
    )


# ---------------------------------------------------------------------------------------------------- answers, time, numbers


def growing_answers(run: RunFigures) -> Finding | None:
    """Answers grow until the limit cuts them."""
    rows = [row for row in run.steps if "answer_tokens_mean" in row]
    if len(rows) < WINDOW:
        return None
    first, last = (mean(row["answer_tokens_mean"] for row in part) for part in (rows[:5], rows[-5:]))
    cut_first, cut = (mean(row.get("cut_responses", 0.0) for row in part) for part in (rows[:5], rows[-5:]))
    if last < 1.3 * first or cut < 0.25 or cut < 1.5 * cut_first:
        return None
    return Finding(
        "problem",
        f"answers grew from {first:.0f} to {last:.0f} tokens, and {cut:.0%} of them are now cut at sampling.max_new_tokens = "
        f"{run.config.sampling.max_new_tokens} (at first {cut_first:.0%})",
        "see that the reward does not pay for length, or let it cost something; algorithm.advantage='dr_grpo' has no bias to "
        "long answers; where they must be long, raise sampling.max_new_tokens",
    )


PARTS = {
    "wait": (
        "waiting for groups",
        "see which stage of episode_seconds grew: longer answers, or slower `reset`, `step` or tools",
    ),
    "train": ("training", "bound the answers (sampling.max_new_tokens, rollout.max_turns), or give it more threads or devices"),
    "publish": ("publishing weights", "see that /dev/shm has room for the weights twice, and what else writes there"),
    "load": ("loading weights", "see what else the engine's machine is doing, and logs/engine-*.log"),
}
"""Parts of a step: their names, and what to do where one grows."""


def slower(run: RunFigures) -> Finding | None:
    """A step takes much longer than the first ones did."""
    rows = [row for row in run.steps if "seconds_step" in row][WARM:]
    if len(rows) < 2 * WINDOW:
        return None
    first, last = rows[:WINDOW], rows[-WINDOW:]
    before, now = (median(row["seconds_step"] for row in part) for part in (first, last))
    if now < 1.5 * before or now - before < 0.2:
        return None

    def growth(part: str) -> float:
        return _median(last, f"seconds_{part}") - _median(first, f"seconds_{part}")

    part = max(PARTS, key=growth)
    name, advice = PARTS[part]
    tokens = [_median(rows, "n_response_tokens") for rows in (first, last)]
    grown = f"; a batch has {tokens[1]:.0f} response tokens in place of {tokens[0]:.0f}" if tokens[1] > 1.2 * tokens[0] else ""
    return Finding(
        "note",
        f"a step takes {now:.2f} s, {now / before:.1f} times as long as the first ones ({before:.2f} s); most of it "
        f"is {name}{grown}",
        advice,
    )


def slow_environment(run: RunFigures) -> Finding | None:
    """The trainer waits, and the episodes spend their time in the environment's code rather than waiting for the model."""
    rows = [row for row in run.steps if "seconds_step" in row][WARM:][-WINDOW:]
    total = sum(row["seconds_step"] for row in rows)
    if len(rows) < 2 or sum(row.get("seconds_wait", 0.0) for row in rows) < 0.3 * total:
        return None
    seconds: dict[str, list[float]] = {}
    for row in rows:
        for stage, value in row.get("episode_seconds", {}).items():
            seconds.setdefault(stage, []).append(value)
    means = {stage: mean(values) for stage, values in seconds.items()}
    playing = {stage: value for stage, value in means.items() if stage not in NOT_ENVIRONMENT}
    if sum(playing.values()) <= means.get("generate", 0.0):
        return None
    worst = max(playing, key=lambda stage: playing[stage])
    return Finding(
        "note",
        f"the environment is the slower half: an episode spends {playing[worst]:.2f} s in {worst} and "
        f"{means.get('generate', 0.0):.2f} s waiting for the model",
        "make `reset`, `step` and tools faster or async, or play more episodes at once (rollout.concurrency)",
    )


def gap_by_modality(run: RunFigures) -> Finding | None:
    """Engine and trainer give different logprobs to samples of one modality: they do not see the same of its media.

    Only answers of the trainer's own weights are judged, also where a batch holds older ones beside them. Of older weights the
    gap is what was learnt since, which differs by modality: in an honest run of `tone-v0` it is up to 0.25 nats one step later,
    and 1e-6 in fresh samples.
    """
    rows = [found for row in run.steps if (found := _fresh(row))][-WINDOW:]
    tokens = {kind: sum(row[kind][1] for row in rows if kind in row) for kind in KINDS}
    gaps = {
        kind: sum(gap * n for row in rows if kind in row for gap, n in (row[kind],)) / tokens[kind]
        for kind in KINDS
        if tokens[kind] >= FRESH_TOKENS
    }
    media = {kind: gap for kind, gap in gaps.items() if kind != "text"}
    if not media:
        return None
    worst = max(media, key=lambda kind: media[kind])
    others = [gap for kind, gap in gaps.items() if kind != worst]
    if media[worst] < (max(APART, 5 * max(others)) if others else APART_ALONE):
        return None
    beside = f", {max(others):.1e} in others" if others else ""
    return Finding(
        "problem",
        f"engine and trainer differ by {media[worst]:.1e} nats a token in fresh samples with {worst}{beside}",
        f"see that both prepare {worst} in the same way: one processor and version in engine and trainer, no cache of media "
        "embeddings over weight updates (engine='embedded' has none), and training.replay_routes for a mixture of experts",
    )


def _fresh(row: Row) -> dict[str, tuple[float, float]]:
    """By modality, the gap of a step's fresh answers and how many tokens it is of; empty where there are none.

    Runs of older versions tell it only of whole batches, and not of how many tokens: each such figure counts as enough.
    """
    if "logprob_gap_fresh" in row:
        return {kind: (gap, row["fresh_tokens"][kind]) for kind, gap in row["logprob_gap_fresh"].items()}
    if row.get("staleness_max") != 0:
        return {}
    return {kind: (row[key], FRESH_TOKENS) for kind in KINDS if (key := f"logprob_gap_{kind}") in row}


KINDS = ("audio", "image", "video", "text")
"""Modalities for which a run may report the gap; `text`: samples without media."""


def _median(rows: Sequence[Row], name: str) -> float:
    return median(row.get(name, 0.0) for row in rows)


def _quoted(names: Sequence[str]) -> str:
    return " and ".join(repr(name) for name in names)


NO_LEARNING = frozenset({nothing_learnt.__name__, collapse.__name__})
"""Checks that say that a run does not learn at all."""
CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        nothing_learnt,
        collapse,
        constant_component,
        held_out_falls,
        same_media,
        same_question,
        few_tasks,
        failing_tasks,
        growing_answers,
        slow_environment,
        slower,
        gap_by_modality,
    )
}
"""All checks by name, in the order in which they are told."""


def findings_of(run: RunFigures) -> dict[str, Finding]:
    """What the checks say of a run, by the name of the check; empty: nothing."""
    return {name: finding for name, check in CHECKS.items() if (finding := check(run)) is not None}
