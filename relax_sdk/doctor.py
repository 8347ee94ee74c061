"""`relax doctor`: whether this machine can train, and what held a run back."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from relax_sdk.errors import ConfigError
from relax_sdk.findings import Finding
from relax_sdk.origin import read_origin
from relax_sdk.run import SENSES, Run
from relax_sdk.run_checks import NO_LEARNING, WARM, RunFigures, findings_of
from relax_sdk.silence import LEAST
from relax_sdk.spans import Spans, read_spans

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

TESTED_PYTHON = (3, 11)


# ------------------------------------------------------------------------------------------------------------ the machine


def examine_machine(folder: Path = Path()) -> list[Finding]:
    """Python, packages, cores, memory and disk.

    Args:
        folder: where runs will be kept.
    """
    version = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    if sys.version_info[:2] == TESTED_PYTHON:
        findings = [Finding("ok", version)]
    else:
        findings = [Finding("note", version, "tested is 3.11; if something fails, make a virtual environment with that")]
    findings += _packages()
    cores = len(os.sched_getaffinity(0))
    findings.append(
        Finding("ok", f"{cores} cores")
        if cores > 1
        else Finding("note", "one core", "engine and trainer share it, so asynchronous training gains nothing")
    )
    for path, least, why in ((Path("/dev/shm"), 0.5, "weights go through it"), (folder, 2.0, "runs are kept there")):
        if not path.exists():
            findings.append(Finding("note", f"no {path}", f"{why}; a temporary folder is used instead"))
            continue
        free = shutil.disk_usage(path).free / 2**30
        level = "ok" if free >= least else "problem"
        advice = "" if level == "ok" else f"{why}: make at least {least:g} GB free"
        findings.append(Finding(level, f"{free:.1f} GB free in {path.resolve()}", advice))
    return findings


def requirements(*extras: str) -> dict[str, SpecifierSet]:
    """The packages that Relax Gym needs, with their tested versions.

    Args:
        extras: optional groups to include, such as `server`.
    """
    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in metadata.requires("relax-gym") or []]
    chosen = [r for r in wanted if not r.marker or any(r.marker.evaluate({"extra": extra}) for extra in extras)]
    return {requirement.name: requirement.specifier for requirement in chosen}


def _packages() -> list[Finding]:
    """Installed versions against those Relax Gym is pinned to."""
    wrong: list[str] = []
    wanted = requirements("server")
    for name, specifier in wanted.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if not specifier.contains(installed.partition("+")[0], prereleases=True):
            wrong.append(f"{name} is {installed}, tested is {specifier}")
    if wrong:
        return [Finding("problem", "; ".join(wrong), "run `make install`, or pip install 'relax-gym[server]'")]
    return [Finding("ok", f"{len(wanted)} packages in their tested versions")]


# ---------------------------------------------------------------------------------------------------------------- a run


def examine_run(folder: Path) -> list[Finding]:
    """Say what metrics and timeline show of a run.

    Args:
        folder: of the run.

    Raises:
        ConfigError: not a run folder, or it has too few steps to say anything.
    """
    run = Run.load(folder)
    rows = [row for row in run.metrics if "seconds_step" in row]
    if len(rows) < WARM + 2:
        raise ConfigError(f"{folder}: {len(rows)} steps are too few to judge; let it make at least {WARM + 2}")
    judged = rows[WARM:]
    spans = read_spans(folder / "timeline")
    origin = read_origin(folder)
    found = findings_of(RunFigures(run.metrics, run.config, origin.examples if origin is not None else None, least=LEAST))
    idle = any(finding.level == "problem" for name, finding in found.items() if name in NO_LEARNING)
    checks: Sequence[Callable[[], list[Finding]]] = (
        lambda: list(found.values()),
        lambda: _speed(judged, spans, "slow_environment" in found)[: 1 if idle else None],  # learning nothing needs no speed
        lambda: _staleness(judged, run.config.max_staleness),
        lambda: _learning(judged, not NO_LEARNING.isdisjoint(found)),
        lambda: _numbers(judged),
        lambda: _failures(rows, spans),
        lambda: senses_findings(folder),
    )
    return [finding for check in checks for finding in check()]


def senses_findings(folder: Path, since: float = 0.0) -> list[Finding]:
    """The verdicts of the newest blindness check in a run's folder, or of the check whose folder it is; none where there was
    no check.

    Args:
        folder: of the run.
        since: checks that were kept before this moment, in Unix seconds, do not count.
    """
    kept = [folder / SENSES, *folder.glob(f"*/{SENSES}")]
    newest = max((path for path in kept if path.is_file()), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None or newest.stat().st_mtime < since:
        return []
    try:
        verdicts = json.loads(newest.read_text())["verdicts"]
        found = [(kind, Finding(v["level"], v["what"], v["advice"])) for kind, v in verdicts.items()]
    except (OSError, ValueError, LookupError, TypeError) as error:
        return [Finding("note", f"{newest} cannot be read ({error!r})", "run `relax check-senses` again")]
    return [replace(finding, what=f"{kind}: {finding.what}") for kind, finding in found]


def _share(rows: Sequence[dict[str, Any]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows) / max(sum(row["seconds_step"] for row in rows), 1e-9)


def engine_busy(spans: Spans, began: float, ended: float) -> float | None:
    """Share of the time between two moments (seconds since the epoch) in which an engine computed, the mean over engines;
    None where no engine recorded anything."""
    shares = []
    for name, events in spans.items():
        if name.startswith("engine-"):
            own = [(e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in events if e["name"] == "generate"]
            inside = sum(max(0.0, min(b, ended) - max(a, began)) for a, b in own)
            if inside:
                shares.append(inside / max(ended - began, 1e-9))
    return mean(shares) if shares else None


def _speed(rows: Sequence[dict[str, Any]], spans: Spans, environment: bool) -> list[Finding]:
    wait, train, publish = (_share(rows, f"seconds_{name}") for name in ("wait", "train", "publish"))
    step = median(row["seconds_step"] for row in rows)
    busy = engine_busy(spans, rows[0]["time"] - rows[0]["seconds_step"], rows[-1]["time"])
    engine = f"; the engine computed {busy:.0%} of the time" if busy is not None else ""
    split = f"a step takes {step:.2f} s: waiting for groups {wait:.0%}, training {train:.0%}, publishing {publish:.0%}{engine}"
    findings = [Finding("ok", split)]
    if wait <= 0.1:
        findings.append(
            Finding("note", "the trainer is the slower half", "give it more threads (training.threads), or smaller batches")
        )
    elif busy is not None and busy >= 0.7:
        findings.append(
            Finding(
                "note",
                "the engine is the slower half",
                "add engines (engines=2), shorten responses (sampling.max_new_tokens), or let rollouts run further ahead "
                "(max_staleness)",
            )
        )
    elif not environment:
        advice = "few episodes are in flight: raise max_staleness, rollout.groups_per_step or rollout.group_size"
        findings.append(Finding("note", "the trainer waits although the engine has time left", advice))
    if publish > 0.1:
        findings.append(
            Finding("note", f"publishing weights takes {publish:.0%} of a step", "see that /dev/shm has room for them twice")
        )
    computed, packed = (sum(row.get(f"{name}_tokens", 0.0) for row in rows) for name in ("forest", "packed"))
    if packed:
        way = f"of {packed:.0f} tokens to train on, {computed:.0f} were computed"
        shared = _mean(rows, "shared")
        how = "prefixes were shared" if shared > 0.5 else "packed one after the other, as sharing prefixes would save little"
        findings.append(Finding("ok", f"{way} ({how})"))
    return findings


def _staleness(rows: Sequence[dict[str, Any]], bound: int) -> list[Finding]:
    dropped = rows[-1].get("dropped_total", 0)
    groups = sum(row.get("n_groups", 0) for row in rows)
    text = f"staleness {_mean(rows, 'staleness_mean'):.2f} on average, at most {max(row['staleness_max'] for row in rows):.0f}"
    findings = [Finding("ok", f"{text} (bound {bound}); {dropped:.0f} groups dropped as too old")]
    if aside := rows[-1].get("set_aside_total", 0):
        text = f"{aside:.0f} groups could not be trained on and were set aside"
        findings.append(Finding("note", text, "the reasons are in the warnings of the run, and in its journal"))
    if dropped > 0.05 * max(groups, 1):
        findings.append(
            Finding("note", f"{dropped / (groups + dropped):.0%} of the groups were played for nothing", "raise max_staleness")
        )
    return findings


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return mean(row.get(name, 0.0) for row in rows)


def _learning(rows: Sequence[dict[str, Any]], silent: bool) -> list[Finding]:
    third = max(1, len(rows) // 3)
    first, last = _mean(rows[:third], "reward"), _mean(rows[-third:], "reward")
    findings = [Finding("ok", f"reward {first:.3f} in the first third of the steps, {last:.3f} in the last")]
    recent = rows[-third:]
    equal = sum(row.get("zero_variance_groups", 0) for row in recent) / max(sum(row.get("n_groups", 0) for row in recent), 1)
    best = max(row.get("reward", 0.0) for row in rows)
    if equal > 0.5 and last < 0.8 * best:
        advice = "lower optimizer.lr, or add algorithm.kl_coef"
        findings.append(Finding("problem", f"reward fell from {best:.3f} to {last:.3f}", advice))
    if equal > 0.5 and not silent:
        best_yet = last >= 0.95 * best and last > first
        advice = (
            "most of these tasks are solved: end the run, or give harder ones"
            if best_yet
            else "choose tasks neither too easy nor too hard, or raise rollout.group_size"
        )
        findings.append(Finding("note", f"{equal:.0%} of the last groups had equal rewards and taught nothing", advice))
    entropy = _mean(recent, "entropy")
    if entropy < 0.01 and equal < 0.5:
        findings.append(
            Finding("note", f"entropy is {entropy:.3f}: little is tried any more", "raise algorithm.entropy_coef or kl_coef")
        )
    return findings


def _numbers(rows: Sequence[dict[str, Any]]) -> list[Finding]:
    fresh = [row["logprob_gap_max"] for row in rows if row["staleness_max"] == 0 and "logprob_gap_max" in row]
    findings = []
    if fresh:
        apart = sum(gap > 1e-3 for gap in fresh)
        text = f"engine and trainer differ by at most {max(fresh):.1e} in logprobs of fresh samples"
        if apart > 0.1 * len(fresh):
            findings.append(Finding("problem", text, "set training.replay_routes for a mixture of experts; else report it"))
        else:
            findings.append(Finding("ok", text))
    clipped = _mean(rows, "clip_fraction")
    if clipped > 0.3:
        findings.append(Finding("note", f"{clipped:.0%} of the tokens are clipped", "lower optimizer.lr or max_staleness"))
    return findings


def _failures(rows: Sequence[dict[str, Any]], spans: Spans) -> list[Finding]:
    findings = []
    totals: dict[str, int] = {}
    for row in rows:
        for status, count in row.get("status", {}).items():
            totals[status] = totals.get(status, 0) + count
    ended = sum(totals.values())
    for status, advice in (
        ("truncated", "raise rollout.max_turns, rollout.max_tokens or sampling.max_new_tokens if they were cut short"),
        ("failed", "see logs/rollout.log"),
    ):
        if totals.get(status, 0) > 0.05 * max(ended, 1):
            findings.append(Finding("note", f"{totals[status] / ended:.0%} of the episodes were {status}", advice))
    unlike = max(row.get("rollout_unlike_groups", 0) for row in rows)
    if unlike:
        advice = "draw what is random in `reset` from self.np_random, after super().reset(seed=seed), or take it from the task"
        text = f"in {unlike:.0f} groups the episodes did not begin with the same observation, so their rewards do not compare"
        findings.append(Finding("problem", text, advice))
    for role in ("engine", "policy", "rollout"):
        starts = sum(name.startswith(f"{role}-") for name in spans)
        if starts > 1:
            findings.append(
                Finding("note", f"the {role} was started {starts} times", f"see logs/{role}.log if you did not resume the run")
            )
    return findings
