"""What was measured of a run: the report of an evaluation, and the blindness check, without their episodes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from relax_sdk.evals.report import REPORT
from relax_sdk.run import SENSES
from relax_server.viewer.folders import read_json

MOST = 64
"""Files whose figures are remembered."""
BASE = "as it is"
"""The condition of the pass in which nothing is changed."""
FIGURES = ("env", "model", "split", "of", "complete", "success", "by", "tasks", "reward", "pass_at", "components")


class Measured:
    """Figures of files in the folder of a run; a file is read again when it has changed. Safe to use from several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[Path, tuple[tuple[int, int], dict[str, Any] | None]] = OrderedDict()
        self._lock = threading.Lock()

    def report(self, folder: Path) -> dict[str, Any] | None:
        """Figures of the evaluation in a folder; None: there are none, or they cannot be read."""
        return self._of(folder / REPORT, _report)

    def senses(self, folder: Path) -> dict[str, Any] | None:
        """The newest blindness check in a run's folder, or in one inside it; None: there is none, or it cannot be read."""
        found = [path for path in (folder / SENSES, *folder.glob(f"*/{SENSES}")) if path.is_file()]
        newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
        return None if newest is None else self._of(newest, _senses)

    def _of(self, file: Path, figures: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any] | None:
        try:
            stat = file.stat()
        except OSError:
            return None
        state = stat.st_mtime_ns, stat.st_size
        with self._lock:
            known = self._known.get(file)
        if known is not None and known[0] == state:
            return known[1]
        try:
            found = figures(read_json(file) or {})
        except (LookupError, TypeError, ValueError, AttributeError):
            found = None
        with self._lock:
            self._known[file] = state, found
            self._known.move_to_end(file)
            while len(self._known) > MOST:
                self._known.popitem(last=False)
        return found


def _report(values: dict[str, Any]) -> dict[str, Any]:
    """The figures of a `report.json`, and its failures with an example of each cause."""
    episodes = values["episodes"]
    examples = {one["failure"]: one["error"] for one in reversed(episodes) if one["failure"] is not None}
    failures = [
        {"cause": cause, "episodes": number, "example": examples.get(cause)} for cause, number in values["failures"].items()
    ]
    tags = [
        {
            **{"tag": tag, "reward": scores["reward"], "once": scores["pass_at"].get("1"), "tasks": scores["tasks"]},
            "failed": sum(scores["failures"].values()),
        }
        for tag, scores in values["by_tag"].items()
    ]
    return {name: values[name] for name in FIGURES} | {"episodes": len(episodes), "failures": failures, "by_tag": tags}


def _senses(values: dict[str, Any]) -> dict[str, Any]:
    """The passes of a `senses.json` as mean rewards with their changes, and the verdicts."""
    passes = [
        {
            **{name: one[name] for name in ("condition", "kind")},
            "reward": fmean(one["rewards"].values()) if one["rewards"] else None,
            "tasks": len(one["rewards"]),
            "change": values["changes"].get(f"{one['condition']} {one['kind']}") if one["condition"] != BASE else None,
        }
        for one in values["passes"]
    ]
    failed = sum(sum(one["failures"].values()) for one in values["passes"])
    names = ("ok", "env", "model", "split", "tasks", "verdicts")
    return {name: values[name] for name in names} | {"passes": passes, "failed": failed}
