"""What there is to say about one run: its settings, where it came from, its state, what it has found, and what it holds."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from relax_sdk.doctor import examine_run
from relax_sdk.errors import RelaxError
from relax_sdk.origin import NOTE
from relax_sdk.run import CONFIG, METRICS
from relax_sdk.run_checks import WARM
from relax_server.journal import postgres
from relax_server.journal.finding import TrajectoryQuery
from relax_server.journal.sql import SqlJournal
from relax_server.viewer.base import ViewedRun
from relax_server.viewer.folders import read_json
from relax_server.viewer.json_lines import end_of
from relax_server.viewer.measured import Measured
from relax_server.viewer.metrics import EVENTS
from relax_server.viewer.summary import status_of

HIDDEN = "hidden"
"""In place of settings that may be secret."""
PLACES = ("file", "folder")
"""Fields of a run's origin that say where things lie."""
MOST = 64
"""Runs whose findings are remembered."""
LEAST = WARM + 2
"""Steps that `relax doctor` needs to judge a run."""
SEEN = 1000
"""Newest trajectories whose media say what the environment shows."""


class Overviews:
    """Pages about runs; what the doctor finds is reckoned again only when the run has gone on."""

    def __init__(self) -> None:
        self._findings: OrderedDict[Path, tuple[tuple[str, str], list[dict[str, str]] | None]] = OrderedDict()
        self._measured = Measured()
        self._lock = threading.Lock()

    def of(self, run: ViewedRun, journal: SqlJournal | None, summary: dict[str, Any]) -> dict[str, Any]:
        """The page about a run.

        Args:
            run: which.
            journal: of the run.
            summary: the line about it.
        """
        folder = run.folder
        config = read_json(folder / CONFIG) if folder is not None else None
        findings = self._of_doctor(folder) if folder is not None else []
        return {
            "summary": summary,
            "config": without_secrets(config) if isinstance(config, dict) else None,
            "origin": _origin(run),
            "status": status_of(run),
            "counts": dataclasses.asdict(journal.counts(run.run)) if journal is not None else None,
            "findings": findings or [],
            "unjudged": LEAST if findings is None else None,
            "report": self._measured.report(folder) if folder is not None else None,
            "senses": self._measured.senses(folder) if folder is not None else None,
            "env": _environment(run, journal),
            "splits": journal.splits(run.run) if journal is not None else {},
            "checkpoints": _checkpoints(folder) if folder is not None else [],
        }

    def _of_doctor(self, folder: Path) -> list[dict[str, str]] | None:
        """What `relax doctor RUN` says; None: it cannot judge, mostly as there are too few steps."""
        state = end_of(folder / METRICS), end_of(folder / EVENTS)
        with self._lock:
            known = self._findings.get(folder)
        if known is not None and known[0] == state:
            return known[1]
        try:
            found = [dataclasses.asdict(finding) for finding in examine_run(folder)]
        except (RelaxError, OSError):
            found = None
        with self._lock:
            self._findings[folder] = state, found
            self._findings.move_to_end(folder)
            while len(self._findings) > MOST:
                self._findings.popitem(last=False)
        return found


def without_secrets(config: dict[str, Any]) -> dict[str, Any]:
    """Settings without the password of a database and without the values of environment variables."""
    ray = config.get("ray")
    if not isinstance(ray, dict):
        return config
    journal, around = ray.get("journal"), ray.get("runtime_env")
    if isinstance(journal, str):
        ray = ray | {"journal": postgres.shown(journal)}
    if isinstance(around, dict) and isinstance(around.get("env_vars"), dict):
        ray = ray | {"runtime_env": around | {"env_vars": dict.fromkeys(around["env_vars"], HIDDEN)}}
    return config | {"ray": ray}


def _origin(run: ViewedRun) -> dict[str, Any] | None:
    noted = read_json(run.folder / NOTE) if run.folder is not None else None
    if not isinstance(noted, dict):
        return None
    return noted if run.shows_paths else {name: value for name, value in noted.items() if name not in PLACES}


def _environment(run: ViewedRun, journal: SqlJournal | None) -> dict[str, Any] | None:
    """What its trajectories show of the environment, whose code is not loaded for this; None: there are none."""
    rows = journal.find(run.run, TrajectoryQuery(limit=SEEN)) if journal is not None else []
    if journal is None or not rows:
        return None
    kinds = sorted({kind for row in rows for kind in row.media or ()})
    called = sorted(_called(journal.by_seq(rows[0].seq).messages))
    rewards = list(dict.fromkeys(name for row in rows for name in row.rewards))
    noted = read_json(run.folder / NOTE) if run.folder is not None else None
    description = noted.get("description") if isinstance(noted, dict) else None
    return {"description": description, "rewards": rewards, "tools": called, "modalities": kinds}


def _called(messages: list[dict[str, Any]]) -> set[str]:
    """Names of the tools that an episode called."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return {str(call["function"]["name"]) for call in calls if isinstance(call, dict) and "name" in call.get("function", {})}


def _checkpoints(folder: Path) -> list[int]:
    try:
        names = [path.name for path in (folder / "checkpoints").iterdir()]
    except OSError:
        return []
    return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step_(\d+)", name)))
