"""The blindness check: whether a policy uses what it is shown, from passes over the same tasks with media taken away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from relax_sdk.evals.report import finite_data, table
from relax_sdk.evals.statistics import Difference, paired_difference
from relax_sdk.findings import Finding

Condition = Literal["as it is", "another task's", "blanked", "shuffled", "pairs", "next", "previous"]
"""`as it is`: nothing is changed. `another task's`: all that is shown is another task's, so that the reward is that of knowing
nothing. `blanked`: silence and grey. `shuffled`: media of a random other task. `pairs`: media swapped with the neighbour that a
task is paired with. `next`, `previous`: media of the task after it, of the one before it; played where the reward is no better
than that of knowing nothing."""
SWAPS: tuple[Condition, ...] = ("pairs", "next", "previous")
HIDDEN: tuple[Condition, ...] = ("blanked", "shuffled")
"""Conditions in which a kind of media tells nothing of the task."""
ALL = "all"
"""Stands for all kinds of media together."""

FEW = 4
"""Tasks at least from which something can be said of whether their media differ."""
PART = 0.25
"""Share of the way from knowing nothing to the full reward that text alone must give to count as a leak."""
MOSTLY = 0.9
"""Share of items that are blank, or of the way from knowing nothing to the best reward, that counts as nearly all."""
HALF = 0.5


@dataclass(frozen=True)
class SensePass:
    """One pass over the tasks."""

    condition: Condition
    kind: str
    """`image`, `audio`, `video`, or `all`."""
    rewards: dict[int, float]
    """By task; without the episodes that failed."""
    answers: dict[int, str] = field(repr=False)
    """What the policy said, by task."""
    failures: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Shown:
    """What an environment shows of one kind of media, as it is."""

    kind: str
    tasks: int
    """Tasks that showed some."""
    items: int
    blank: int
    """Items that are silent, or of one colour."""
    distinct: int
    """Different items."""


@dataclass(frozen=True)
class SensesResults:
    """What was played and seen."""

    env: str
    model: str
    split: str
    tasks: int
    declared: list[str]
    """`Env.modalities`."""
    shown: list[Shown]
    passes: list[SensePass]

    def find(self, condition: Condition, kind: str = ALL) -> SensePass | None:
        """The pass under a condition."""
        return next((p for p in self.passes if p.condition == condition and p.kind == kind), None)

    def difference(self, after: SensePass | None, before: SensePass | None) -> Difference | None:
        """`after` less `before`, paired by task; None where one was not played or they have no task in common."""
        if after is None or before is None:
            return None
        tasks = sorted(after.rewards.keys() & before.rewards.keys())
        return paired_difference([before.rewards[t] for t in tasks], [after.rewards[t] for t in tasks]) if tasks else None


@dataclass(frozen=True)
class SensesReport:
    """The results and a verdict on each kind of media."""

    results: SensesResults
    verdicts: dict[str, Finding]
    """By kind, and for `text` where it gives answers away; empty where nothing but text is shown or declared."""

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not any(verdict.level == "problem" for verdict in self.verdicts.values())

    @property
    def findings(self) -> list[Finding]:
        """The verdicts, each with its kind of media in front."""
        return [replace(verdict, what=f"{kind}: {verdict.what}") for kind, verdict in self.verdicts.items()]

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is not finite becomes None."""
        base = self.results.find("as it is")
        changes = {
            f"{p.condition} {p.kind}": None if (d := self.results.difference(p, base)) is None else asdict(d)
            for p in self.results.passes
        }
        verdicts = {kind: asdict(verdict) for kind, verdict in self.verdicts.items()}
        return finite_data({"ok": self.ok, "verdicts": verdicts, "changes": changes, **asdict(self.results)})

    def to_markdown(self) -> str:
        """The report for people: a table of all passes, and a line for each verdict."""
        results, base = self.results, self.results.find("as it is")
        rows = []
        for played in results.passes:
            change = None if played is base else results.difference(played, base)
            told = ("", "") if change is None else (f"{change.mean:+.3f}", f"{change.low:+.3f} … {change.high:+.3f}")
            rows.append((played.kind, played.condition, f"{mean(played):.3f}", *told, str(len(played.rewards))))
        lines = [f"# What {results.model} uses of {results.env} [{results.split}]", ""]
        lines += table(("media", "shown", "reward", "change", "95%", "tasks"), rows)
        failures = sum((Counter(p.failures) for p in results.passes), Counter[str]())
        if failures:
            lines += ["", "Failed and in no figure: " + ", ".join(f"{n} {cause}" for cause, n in failures.most_common())]
        lines += ["", *(f"- **{kind}**: {verdict.sentence}" for kind, verdict in self.verdicts.items())]
        if not self.verdicts:
            lines += ["Nothing but text is shown: there is nothing to check."]
        return "\n".join([*lines, ""])

    def __str__(self) -> str:
        return self.to_markdown()


def mean(played: SensePass) -> float:
    """The mean reward of a pass; NaN where every episode failed."""
    return sum(played.rewards.values()) / len(played.rewards) if played.rewards else float("nan")


def donors_of(tasks: Sequence[int], condition: Condition, order: Sequence[int]) -> dict[int, int]:
    """The task whose media each task is given; one that is left over is not in it.

    Args:
        tasks: that show some, ascending.
        condition: one that exchanges media.
        order: the same tasks in random order, for `shuffled` and `another task's`.
    """
    n = len(tasks)
    if condition == "pairs":
        return {tasks[i]: tasks[i ^ 1] for i in range(n // 2 * 2)}
    if condition in ("next", "previous"):
        step = 1 if condition == "next" else -1
        return {tasks[i]: tasks[(i + step) % n] for i in range(n)} if n > 1 else {}
    return {order[i]: order[(i + 1) % n] for i in range(n)} if n > 1 else {}


def judge(results: SensesResults) -> SensesReport:
    """A verdict on each kind of media that is shown or declared."""
    by_kind = {shown.kind: shown for shown in results.shown}
    kinds = sorted({*results.declared, *by_kind})
    verdicts = {kind: _absent(kind, by_kind.get(kind)) or _judge_kind(results, kind, by_kind.keys()) for kind in kinds}
    leak = _leak(results) if by_kind else None
    return SensesReport(results, verdicts | ({} if leak is None else {"text": leak}))


NOUNS = {"image": "images", "audio": "sounds", "video": "films"}
BLANKS = {"image": "of one colour", "audio": "silent", "video": "of one colour"}


def _absent(kind: str, shown: Shown | None) -> Finding | None:
    """What is wrong with the media themselves, whatever the policy does with them."""
    what = NOUNS.get(kind, kind)
    if shown is None or shown.items == 0:
        advice = f"add the {kind} to what `reset` or `step` returns, or take it out of `modalities`"
        return Finding("problem", f"{what} are declared in `modalities`, but no task shows one: they are dropped", advice)
    if shown.blank >= MOSTLY * shown.items:
        advice = "look at how they are loaded; `relax envs show` and the episode's media show what arrives"
        blank = f"{shown.blank} of {shown.items} {what} are blank ({BLANKS[kind]}) before anything was changed"
        return Finding("problem", blank, advice)
    if shown.distinct == 1 and shown.tasks >= FEW:
        return Finding("problem", f"all {shown.tasks} tasks show the same {kind}", "look at how the row's media are chosen")
    return None


def _judge_kind(results: SensesResults, kind: str, kinds: Any) -> Finding:
    what, base = NOUNS[kind], results.find("as it is")
    floor, above = results.find("another task's"), results.difference(base, results.find("another task's"))
    if base is None or floor is None or above is None:
        return Finding("note", f"too few tasks show {what}, so nothing can be said", "raise --limit")
    rewards = f"{mean(base):.3f}"
    if at_chance(results):
        return _at_chance(results, kind, f"{rewards}, no better than with another task's observations ({mean(floor):.3f})")
    changes: dict[Condition, Difference | None] = {c: results.difference(results.find(c, kind), base) for c in HIDDEN}
    drops: dict[Condition, Difference] = {c: d for c, d in changes.items() if d is not None}
    fall = min(drops.items(), key=lambda item: item[1].high, default=None)
    if fall is None:
        return Finding("note", f"too few tasks show {what}, so nothing can be said", "raise --limit")
    condition, drop = fall
    by = f"{-drop.mean:.3f} [{-drop.high:.3f}, {-drop.low:.3f}]"
    told = f"the reward falls from {rewards} by {by} with the {what} {condition}"
    if drop.high < 0:
        return Finding("ok", f"used: {told}")
    if min(d.low for d in drops.values()) < -HALF * above.mean:
        return Finding("note", f"unclear: {told}, and the interval is wide", "raise --limit")
    alone = results.find("blanked") or results.find("blanked", kind)
    without = results.difference(alone, floor)
    if without is not None and without.low > 0:
        return Finding(
            "problem",
            f"not used: the reward of {rewards} does not fall with the {what} blanked or shuffled, and stays at "
            f"{mean(alone) if alone else 0:.3f} without any media: the task leaks its answers",
            "look for the answer in the text, in file names, in tool results or in the order of options",
        )
    return _not_used(results, kind, kinds, drops, above)


def _not_used(results: SensesResults, kind: str, kinds: Any, drops: dict[Condition, Difference], above: Difference) -> Finding:
    """The verdict where a policy that earns something earns as much without a kind of media.

    It is a problem where reward is left to earn; where the other kinds earn all of it, nothing is lost.

    Args:
        results: of all passes.
        kind: that is not used.
        kinds: that are shown.
        drops: by what was done to this kind, the change of the reward.
        above: what the reward is above that of knowing nothing.
    """
    what, base = NOUNS[kind], results.find("as it is")
    condition, drop = min(drops.items(), key=lambda item: item[1].mean)
    deaf = results.find(condition, kind)
    assert base is not None and deaf is not None
    best = max(reward for played in results.passes for reward in played.rewards.values())
    left = paired_difference(list(deaf.rewards.values()), [best] * len(deaf.rewards))
    found = (
        f"not used: the policy does not use the {what}; its reward of {mean(base):.3f}, where the best task earned {best:.3f}, "
        f"changes by {drop.mean:+.3f} [{drop.low:+.3f}, {drop.high:+.3f}] with them {condition}"
    )
    others = ", ".join(NOUNS[k] for k in sorted(kinds) if k != kind)
    if left.low <= 0:
        return Finding("note", found, f"the {others} suffice" if others else "")
    if left.low <= (1 - MOSTLY) * (best - mean(base) + above.mean):
        return Finding("note", found, "too little is left to earn to tell whether they are needed")
    if min(d.low for d in drops.values()) < -PART * above.mean:
        return Finding("note", found, "raise --limit, as it may use them a little")
    return Finding(
        "problem",
        found,
        "train longer, with tasks that they alone decide, or see whether they reach the model: the number of placeholder "
        "tokens, the endpoint's limits",
    )


def _at_chance(results: SensesResults, kind: str, rewards: str) -> Finding:
    """The verdict where the policy earns no more than by knowing nothing."""
    what = NOUNS[kind]
    gains = {c: d for c in SWAPS if (d := _gain(results, results.find(c, kind))) is not None}
    if gains:
        condition, gain = max(gains.items(), key=lambda item: item[1].mean)
        whose = {"pairs": "the task that it is paired with", "next": "the task after it", "previous": "the task before it"}
        return Finding(
            "problem",
            f"swapped between samples: the reward is {rewards}, and rises by {gain.mean:.3f} [{gain.low:.3f}, {gain.high:.3f}] "
            f"where each task gets the {what} of {whose[condition]}",
            "look at how media and rows are put together: an index that is off by one, a shuffle of one column alone",
        )
    changed = _changed(results, kind)
    if changed == 0:
        return Finding(
            "problem",
            f"not used: the answers are the same whatever {what} are shown, and the reward is {rewards}",
            "train longer, or see whether they reach the model: the number of placeholder tokens, the endpoint's limits",
        )
    return Finding(
        "note",
        f"nothing learnt: the reward is {rewards}, though {changed:.0%} of the answers change with the {what}",
        "check a policy that earns a reward; if this one should, the media may belong to other tasks",
    )


def _gain(results: SensesResults, swapped: SensePass | None) -> Difference | None:
    """What a swap adds to the reward, where that is more than chance; None where it is not."""
    gain = results.difference(swapped, results.find("as it is"))
    above = results.difference(swapped, results.find("another task's"))
    return gain if gain is not None and above is not None and gain.low > 0 and above.low > 0 else None


def at_chance(results: SensesResults) -> bool:
    """Whether the policy earns no more than by knowing nothing of the task."""
    above = results.difference(results.find("as it is"), results.find("another task's"))
    return above is not None and not above.low > 0


def _changed(results: SensesResults, kind: str) -> float:
    """Share of the answers that are others when media are shuffled or blanked."""
    base = results.find("as it is")
    pairs = [
        (base.answers[task], answer)
        for condition in HIDDEN
        if base is not None and (played := results.find(condition, kind)) is not None
        for task, answer in played.answers.items()
        if task in base.answers
    ]
    return sum(before != after for before, after in pairs) / len(pairs) if pairs else 0.0


def _leak(results: SensesResults) -> Finding | None:
    """Whether the text alone gives a good part of the answers."""
    base, floor, kinds = results.find("as it is"), results.find("another task's"), {p.kind for p in results.passes} - {ALL}
    only = next(iter(kinds)) if len(kinds) == 1 else ALL
    alone = [p for p in (results.find("blanked", only), results.find("shuffled", only)) if p is not None and p.rewards]
    blind = max(alone, key=mean, default=None)  # a policy that reads may still answer nothing where it is shown a grey picture
    without, above = results.difference(blind, floor), results.difference(base, floor)
    if without is None or above is None or blind is None or floor is None or not (above.low > 0 and without.low > 0):
        return None
    if without.mean < PART * above.mean:
        return None
    return Finding(
        "problem",
        f"leaks: with all media {blind.condition} the reward is still {mean(blind):.3f}, where knowing nothing of the task "
        f"gives {mean(floor):.3f}",
        "look for the answer in the text, in file names, in tool results or in the order of options",
    )
