"""What a run that learns nothing says, and why: pure functions over its settings and its metrics.

They are two of the checks of a run: see `relax_sdk.run_checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relax_sdk.config import RunConfig
from relax_sdk.defaults import from_random_weights
from relax_sdk.findings import Finding

WINDOW = 10
"""Steps after which silence is told."""
LEAST = 5
"""Steps that a finished run must have made to be judged."""
ALL = 0.95
"""This share counts as all of them."""
SHORT_ANSWER = 4
"""Tokens; an answer that is a letter or a number may end at such a limit as it should."""
LONG_ANSWER = 32
"""Tokens; a model from random weights seldom ends an answer by itself where so many are allowed."""
HIGHEST_LR = {True: 1e-2, False: 1e-4}
"""Learning rates above it do harm, to a model from random weights (True) and to a trained one."""
HIGHEST_LR_OF_ADAPTERS = 5e-3
"""The same for low-rank adapters."""
GROUP_RELATIVE = frozenset({"grpo", "dr_grpo", "rloo"})
"""Advantages that compare the episodes of a group."""
READABLE = (
    'say the form in the prompt (system_prompt): <tool_call>{"name": …, "arguments": {…}}</tool_call>, show it with '
    "format_example, or train a model that knows it"
)
"""What makes tool calls readable."""

Row = Mapping[str, Any]


def missing(config: RunConfig, examples: bool | None) -> list[Finding]:
    """Find what a run lacks before its first step.

    Args:
        config: its settings.
        examples: whether the environment defines `format_example`; None: not known.
    """
    findings = []
    if config.rollout.group_size == 1 and config.algorithm.advantage in GROUP_RELATIVE:
        findings.append(
            Finding(
                "problem",
                f"rollout.group_size = 1: the advantage {config.algorithm.advantage!r} compares the episodes of a group, so "
                "nothing is learnt from a single one",
                "set rollout.group_size to 2 or more; 8 to 16 are usual",
            )
        )
    scratch = from_random_weights(config.model)
    adapted = config.lora.rank > 0
    if config.optimizer.lr > (most := HIGHEST_LR_OF_ADAPTERS if adapted else HIGHEST_LR[scratch]):
        model, usual = ("from random weights", "1e-3") if scratch else ("that is trained", "1e-5" if adapted else "1e-6")
        what = f"optimizer.lr = {config.optimizer.lr:g} destroys a model {model} within a few steps"
        findings.append(Finding("problem", what, f"set optimizer.lr to {most:g} or less; {usual} is usual"))
    lacks = _lacks(config, examples) if scratch and examples is not None else []
    if lacks:
        what = f"{config.model} starts from random weights and emits noise until it is shown what an answer looks like"
        what += f", and {_join(lack for lack, _ in lacks)}"
        findings.append(Finding("problem", what, _join(how for _, how in lacks)))
    return findings


def _lacks(config: RunConfig, examples: bool | None) -> list[tuple[str, str]]:
    """What a model from random weights needs and this run does not have, and how to get it."""
    lacks = []
    if examples is False:
        lacks.append(
            (
                "the environment has no format_example",
                "define format_example(rng), which gives the run a format warm-up, or train a pretrained model "
                "(model='relax/smollm2-135m', or a Hugging Face folder)",
            )
        )
        if config.sampling.max_new_tokens >= LONG_ANSWER:
            lacks.append(
                (
                    f"its answers are cut at {config.sampling.max_new_tokens} tokens",
                    "set sampling.max_new_tokens to the length of an answer",
                )
            )
    elif config.warmup.steps == 0:
        lacks.append(("warmup.steps = 0 leaves the format warm-up out", "set warmup.steps to 60"))
    hold = config.algorithm.kl_coef > 0 or config.algorithm.entropy_coef == 0
    if not hold and (lacks or config.sampling.max_new_tokens >= LONG_ANSWER):
        lacks.append(("its entropy bonus undoes the form of long answers", "add **relax.FROM_SCRATCH to Trainer(…)"))
    return lacks


def silence(rows: Sequence[Row], config: RunConfig, examples: bool | None = None, least: int = WINDOW) -> Finding | None:
    """Judge the last steps of a run: did they teach nothing, were all their episodes cut, or could no tool call be read?

    Args:
        rows: metrics by step, oldest first, of the whole run.
        config: its settings.
        examples: whether the environment defines `format_example`; None: not known.
        least: fewer steps are not judged.

    Returns:
        A `problem`, or a `note` where the task is solved; None: the run learns.
    """
    recent = [row for row in rows if "n_groups" in row][-WINDOW:]
    if len(recent) < least:
        return None
    groups = sum(row["n_groups"] for row in recent)
    if groups and all(row.get("zero_variance_groups", 0) >= row["n_groups"] for row in recent):
        return _flat(rows, recent, groups, config, examples)
    if _truncated(recent) >= ALL:
        return Finding("problem", f"all episodes of the last {len(recent)} steps were cut", _limits(recent, config))
    if (unreadable := _mean(recent, "unreadable_calls")) >= ALL:
        what = f"{unreadable:.0%} of the answers of the last {len(recent)} steps hold a tool call that cannot be read"
        return Finding("problem", f"{what}{_sample(recent)}", READABLE)
    return None


def _flat(rows: Sequence[Row], recent: Sequence[Row], groups: int, config: RunConfig, examples: bool | None) -> Finding:
    """All groups had equal rewards: the task is solved, the policy always does the same, or no answer ever earned anything."""
    low = min(row.get("reward_min", row["reward"]) for row in recent)
    high = max(row.get("reward_max", row["reward"]) for row in recent)
    what = (
        f"nothing was learnt in the last {len(recent)} steps: in each of {groups:.0f} groups all episodes had the same reward"
    )
    worst = min(row["reward"] for row in rows if "reward" in row)
    best = max(row["reward"] for row in rows if "reward" in row)
    same = high - low < 1e-9
    if same and low >= best - 1e-9 and low > worst + 1e-9:
        return Finding(
            "note",
            f"{what}, and it is the best of the run, {low:.3f}: the task is solved",
            "end the run, or give harder tasks",
        )
    what += f" ({low:.3f})" if same else f" (from {low:.3f} to {high:.3f} between the groups)"
    if config.rollout.group_size == 1:
        return Finding("problem", what, "a group of one has nothing to be compared with: set rollout.group_size to 2 or more")
    cause = _cause(recent, config, examples, same)
    return Finding("problem", f"{what}{_sample(recent)}", cause)


def _cause(recent: Sequence[Row], config: RunConfig, examples: bool | None, same: bool) -> str:
    """The likely cause, and the setting to change."""
    cut = _mean(recent, "cut_responses")
    if same and _truncated(recent) >= ALL:
        return _limits(recent, config)
    lacks = _lacks(config, examples) if from_random_weights(config.model) else []
    if same and lacks:
        return f"Likely because {lacks[0][0]}, so that the model emits noise: {_join(how for _, how in lacks)}"
    if same and (earned := recent[-1]["reward"]) > 0 and all(row["reward"] == earned for row in recent):
        return f"Likely because the reward does not look at the answer: every one earns {earned:g}; let wrong ones earn less"
    if same and cut >= ALL and config.sampling.max_new_tokens > SHORT_ANSWER:
        return (
            f"Likely because {cut:.0%} of the answers are cut at sampling.max_new_tokens = {config.sampling.max_new_tokens} "
            "before they end: raise it, or ask for shorter answers"
        )
    if (unreadable := _mean(recent, "unreadable_calls")) >= ALL:
        return f"Likely because {unreadable:.0%} of the answers hold a tool call that cannot be read: {READABLE}"
    if not same and _mean(recent, "entropy") < 0.05:
        return (
            "the policy has stopped trying (entropy "
            f"{_mean(recent, 'entropy'):.3f}): lower optimizer.lr, or raise algorithm.kl_coef or algorithm.entropy_coef"
        )
    if same:
        short = (
            f"; raise sampling.max_new_tokens = {config.sampling.max_new_tokens}, at which they are cut, where they are longer"
        )
        return (
            "Likely because no answer has the form that the environment rewards: look at the sample answer, compare answers "
            "without case and spaces (.strip().lower()), say the form in the prompt (system_prompt), or give tasks that are "
            f"sometimes solved{short if cut >= ALL else ''}"
        )
    return "the tasks are too easy or too hard: choose others, raise rollout.group_size, or raise sampling.temperature"


def _limits(recent: Sequence[Row], config: RunConfig) -> str:
    """Which limit cuts the episodes."""
    all_turns = _mean(recent, "turns_mean") >= ALL * config.rollout.max_turns > 1
    if _mean(recent, "cut_responses") >= ALL and not all_turns:
        return (
            f"their answers end at sampling.max_new_tokens = {config.sampling.max_new_tokens} or where the episode's tokens "
            f"do, rollout.max_tokens = {config.rollout.max_tokens}: raise them, or ask for shorter answers"
        )
    return (
        f"no episode comes to its end within rollout.max_turns = {config.rollout.max_turns} and rollout.max_tokens = "
        f"{config.rollout.max_tokens}: raise them, or let the environment return terminated=True earlier"
    )


def _truncated(recent: Sequence[Row]) -> float:
    ended: dict[str, int] = {}
    for row in recent:
        for status, count in row.get("status", {}).items():
            ended[status] = ended.get(status, 0) + count
    return ended.get("truncated", 0) / max(sum(ended.values()), 1)


def _sample(recent: Sequence[Row]) -> str:
    samples = next((row["samples"] for row in reversed(recent) if row.get("samples")), None)
    return f"; an answer was {samples[0]['answer']!r}" if samples else ""


def _mean(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows) / max(len(rows), 1)


def _join(parts: Iterable[str]) -> str:
    return "; ".join(parts)
