"""One line about a run: its state, its step, and how well it does."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from relax_sdk.errors import JournalError
from relax_sdk.evals.plan import PLAN
from relax_sdk.run import CONFIG, METRICS
from relax_sdk.run_lock import LOCK, Holder
from relax_server.journal.finding import TrajectoryQuery
from relax_server.viewer.base import ViewedRun
from relax_server.viewer.folders import read_json
from relax_server.viewer.json_lines import read_lines
from relax_server.viewer.metrics import EVENTS

State = Literal["running", "done", "stopped", "failed", "unknown"]
STATUS = "status.json"
LAST = 10
"""Steps of `reward_last10`."""
NEWEST = 20
"""Episodes of a rollout or a session whose mean reward is told."""
MOST = 2000
"""Runs whose figures are remembered."""
ENDS: dict[str, State] = {"stopped": "stopped", "failed": "failed", "ended": "done"}
"""How a run ended, by the kind of its last such event."""


@dataclass
class _Figures:
    """What was read of a run's metrics and events so far."""

    metrics_at: str | None = None
    events_at: str | None = None
    first: float | None = None
    time: float | None = None
    step: int | None = None
    rewards: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LAST))
    held_out: tuple[float | None, float | None] = (None, None)
    end: State | None = None
    problems: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)
    """What was noticed and is no problem; a number in it may change while it is the same."""
    events: bool = False


class Summaries:
    """Lines about runs. What grows is read from where it was left; safe to use from several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, _Figures] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, run: ViewedRun) -> dict[str, Any]:
        """The line about a run; None where something is not known."""
        config = read_json(run.folder / CONFIG) if run.folder is not None else None
        config = config if isinstance(config, dict) else {}
        figures = self._figures(run.folder) if run.folder is not None else _Figures()
        rewards = [reward for _, reward in figures.rewards]
        held_out, ci95 = figures.held_out
        return {
            "name": run.name,
            **{name: config.get(name) for name in ("env", "model", "mode", "seed", "steps")},
            "step": figures.step,
            "state": state_of(run.folder, config, figures.step, figures.end),
            "reward": rewards[-1] if rewards else None,
            "reward_last10": fmean(rewards) if rewards else None,
            "held_out": held_out,
            "held_out_ci95": ci95,
            "started": figures.first or _born(run.folder),
            "updated": figures.time or _changed(run.folder),
            "problems": len(figures.problems) if figures.events else None,
            "notes": len(figures.notes) if figures.events else None,
            "trajectories": _count(run),
            "evaluation": run.folder is not None and (run.folder / PLAN).is_file(),
            "played": run.folder is None,
            "folder": str(run.folder) if run.folder is not None and run.shows_paths else None,
        } | (_of_episodes(run) if run.folder is None else {})

    def state(self, run: ViewedRun, config: Any) -> State:
        """Whether a run goes on, and if not, how it ended; `config` is what its settings say."""
        figures = self._figures(run.folder) if run.folder is not None else _Figures()
        return state_of(run.folder, config if isinstance(config, dict) else {}, figures.step, figures.end)

    def _figures(self, folder: Path) -> _Figures:
        with self._lock:
            known = self._known.setdefault(folder, _Figures())
            self._known.move_to_end(folder)
            if len(self._known) > MOST:
                self._known.popitem(last=False)
            metrics = read_lines(folder / METRICS, known.metrics_at)
            events = read_lines(folder / EVENTS, known.events_at)
            if metrics.reset or events.reset:
                known = self._known[folder] = _Figures()
                metrics, events = read_lines(folder / METRICS), read_lines(folder / EVENTS)
            for row in metrics.rows:
                _add_step(known, row)
            for row in events.rows:
                _add_event(known, row)
            known.metrics_at, known.events_at = metrics.next, events.next
            return known


def _add_step(known: _Figures, row: dict[str, Any]) -> None:
    step, reward = row.get("step"), row.get("reward")
    if not isinstance(step, int):
        return
    known.step, known.time = step, row.get("time", known.time)
    if known.first is None and known.time is not None:
        known.first = known.time - row.get("seconds_step", 0.0)
    if isinstance(reward, (int, float)):
        while known.rewards and known.rewards[-1][0] >= step:  # trained again after a restart
            known.rewards.pop()
        known.rewards.append((step, reward))
    if isinstance(row.get("eval_reward"), (int, float)):
        known.held_out = row["eval_reward"], row.get("eval_ci95")


def _add_event(known: _Figures, row: dict[str, Any]) -> None:
    known.events = True
    kind, time = row.get("kind"), row.get("time")
    if kind == "started":
        known.end = None
        known.first = min(time, known.first or time) if time is not None else known.first
    if kind in ENDS:
        known.end = ENDS[kind]
    if row.get("level") == "problem":
        known.problems.add(str(row.get("what")))
    if row.get("level") == "note" and kind == "finding":
        known.notes.add(re.sub(r"[\d.,%]+", "#", str(row.get("what"))))


def status_of(run: ViewedRun) -> Any:
    """How a run and its roles stand, as it has noted; without processes and hosts for who may not see them."""
    status = read_json(run.folder / STATUS) if run.folder is not None else None
    if run.shows_paths or not isinstance(status, dict):
        return status
    hidden = {"pid", "host", "log"}
    roles = [{k: v for k, v in role.items() if k not in hidden} for role in status.get("roles") or () if isinstance(role, dict)]
    return status | {"roles": roles}


def state_of(folder: Path | None, config: dict[str, Any], step: int | None, end: State | None) -> State:
    """Whether a run goes on, and if not, how it ended.

    Args:
        folder: of the run.
        config: of the run.
        step: its last one.
        end: how its last event says that it ended.
    """
    if folder is None:
        return "unknown"
    going_on = _going_on(folder)
    if going_on:
        return "running"
    if end is not None:
        return end
    if step is not None and step >= (config.get("steps") or 0):
        return "done"
    return "unknown" if going_on is None else "stopped"


def _going_on(folder: Path) -> bool | None:
    """Whether a program carries the run out, as its lock file says, which is read and never locked; None: not known."""
    noted = read_json(folder / LOCK)
    try:
        holder = Holder.from_dict(noted) if isinstance(noted, dict) else None
    except (KeyError, TypeError, ValueError):
        return None
    if holder is None:
        return False if (folder / LOCK).exists() else None
    return not holder.ended()


def _of_episodes(run: ViewedRun) -> dict[str, Any]:
    """What the newest episodes of a rollout or a session say of it: there are no settings, no steps and no events."""
    try:
        journal = run.open_journal()
        rows = journal.find(run.run, TrajectoryQuery(limit=NEWEST)) if journal is not None else []
    except JournalError:
        rows = []
    rewards = [row.reward for row in rows if row.reward is not None]
    mean = fmean(rewards) if rewards else None
    return {"env": rows[0].env, "updated": rows[0].created_at, "reward": mean, "reward_last10": mean} if rows else {}


def _count(run: ViewedRun) -> int | None:
    try:
        journal = run.open_journal()
        return journal.count(run.run, TrajectoryQuery()) if journal is not None else 0
    except JournalError:
        return None


def _born(folder: Path | None) -> float | None:
    return _changed(folder / CONFIG) if folder is not None else None


def _changed(path: Path | None) -> float | None:
    try:
        return path.stat().st_mtime if path is not None else None
    except OSError:
        return None
