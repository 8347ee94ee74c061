"""Each architecture in each layout of docs/layouts.md: is it trained as in one process, does a rank hold what was planned, and
does a run lose anything when its ranks are killed?

    python -m benchmarks.layouts [--only layouts|plan|kills] [-k EXPRESSION]

Runs the tests that answer this and makes tables of what they measured. In `layouts`, the number below a layout is the largest
difference of a gradient from one process, relative to the tensor's largest number (bar: 1e-5); *loss* and *weights* are the
largest ones of all its layouts (bars: 1e-5; 1e-4 after a step, as AdamW divides a gradient by its size). In `plan`, each kind
of memory has the largest relative difference of what `relax plan` says of a rank and what that rank holds; positive where the
plan says more (bar: 10%). `kills` is of one run: *killed* counts how often a rank was ended by SIGKILL, *taken* the groups of
the run's steps, *acked* the different groups that the journal has as trained on, and *leased* those the trainer still holds
(bars: as many acked as taken; 0 leased). `each` in the JSON has every cell, and why a layout is refused.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.report import RESULTS, save

MEASURED = "measured"
"""Name of the property in which a test tells what it measured, as JSON."""
ROOT = Path(__file__).parents[1]
FILES = {
    "layouts": "tests/training/test_layout_table.py",
    "plan": "tests/training/test_plan_table.py",
    "kills": "tests/roles/test_ranks.py::test_killing_each_of_four_ranks_ten_times_loses_nothing",
}
BARS = {
    "layouts": {"loss, gradients": 1e-5, "weights": 1e-4},
    "plan": {"each kind": 0.1},
    "kills": {"acked": "as many as taken", "leased": 0},
}


def run_tests(file: str, chosen: list[str]) -> tuple[list[dict[str, Any]], int]:
    """What the tests of a file have measured, and their exit status; their progress is shown.

    Args:
        file: of tests, or one of its tests, below the root of the repository.
        chosen: more arguments of pytest.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "nightly", "-n", "1", "-v", f"--junitxml={report}", file, *chosen]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if not report.exists():
            return [], done.returncode
        found = ElementTree.parse(report).iter("property")
        return [json.loads(each.attrib["value"]) for each in found if each.attrib["name"] == MEASURED], done.returncode


def by_architecture(found: list[dict[str, Any]], cells: bool) -> list[dict[str, Any]]:
    """One row for each architecture, with the largest number of each kind.

    Args:
        found: one for each architecture and layout.
        cells: with a column for each layout, which has its gradients' difference.
    """
    rows: dict[str, dict[str, Any]] = {}
    for one in found:
        row = rows.setdefault(one["architecture"], {"architecture": one["architecture"]})
        if cells:
            row[one["layout"].replace("`", "")] = "refused" if "refused" in one else one["gradients"]
        for kind, value in one.items():
            if isinstance(value, float) and abs(value) >= abs(row.get(kind, 0.0)) and not (cells and kind == "gradients"):
                row[kind] = value
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(FILES))
    parser.add_argument(
        "-k", default="", help="only the tests whose names match, as with pytest; the tables go to a temporary folder"
    )
    args = parser.parse_args()
    failed = False
    for name, file in FILES.items():
        if args.only in (None, name):
            found, status = run_tests(file, ["-k", args.k] if args.k else [])
            failed = failed or status != 0
            rows = found if name == "kills" else by_architecture(found, cells=name == "layouts")
            folder = Path(tempfile.mkdtemp()) if args.k else RESULTS
            save(name, rows, folder=folder, bars=BARS[name], tests_passed=status == 0, each=found)
    if failed:
        sys.exit("tests have failed: see above")


if __name__ == "__main__":
    main()
