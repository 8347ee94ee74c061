"""Chooses what `make check` runs: the tests nearest to a change, then the fastest of every file, within a budget of seconds.

*Near* is counted in imports: a test file that imports a changed module is nearer than one that reaches it through others.
Coverage is of no use here, as most of the product runs in processes that the tests start. How long tests take is read from
`durations.json`, which `make durations` writes; a test that it does not name counts as fast.
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
DURATIONS = ROOT / "tests" / "durations.json"
PACKAGES = {"relax_sdk": "relax_sdk", "relax_server": "server/relax_server", "relax_envs": "envs/relax_envs"}
PACKAGES["relax_agents"] = "agents/relax_agents"
"""Folder of each package by its import name."""
BUDGET = 120.0
"""Seconds of tests and fixtures in all, over both workers."""
CORE = 40.0
"""Seconds of the budget for the fastest tests of every file, whatever has changed."""
UNKNOWN = 0.02
"""Seconds that a test counts which `durations.json` does not name."""
SHORT = 0.1
"""Tests below these seconds are not named in `durations.json`."""


@dataclass
class FileTimes:
    """Seconds that one test file takes: its fixtures, and each test by its name."""

    setup: float = 0.0
    tests: dict[str, float] = field(default_factory=dict)


def read_times() -> dict[str, FileTimes]:
    """Seconds by test file, a path relative to the repository; empty where nothing has been measured."""
    if not DURATIONS.exists():
        return {}
    return {name: FileTimes(**value) for name, value in json.loads(DURATIONS.read_text()).items()}


def write_times(times: dict[str, FileTimes]) -> None:
    """Write `durations.json`."""
    rows = {}
    for name, file in sorted(times.items()):
        tests = {test: round(seconds, 2) for test, seconds in sorted(file.tests.items()) if seconds >= SHORT}
        if tests or file.setup >= SHORT:
            rows[name] = asdict(FileTimes(round(file.setup, 2), tests))
    DURATIONS.write_text(json.dumps(rows, indent=1) + "\n")


def changed_files(base: str) -> set[str]:
    """Files that differ from commit `base`, new ones included; paths relative to the repository.

    Raises:
        RuntimeError: git does not know the commit.
    """
    return {*_git("diff", "--name-only", base, "--"), *_git("ls-files", "--others", "--exclude-standard")}


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def module_of(path: str) -> str | None:
    """Import name of a product file, by its path relative to the repository; None for any other file."""
    for package, folder in PACKAGES.items():
        if path.startswith(f"{folder}/") and path.endswith(".py"):
            inside = path.removeprefix(f"{folder}/").removesuffix(".py").removesuffix("__init__").rstrip("/")
            return ".".join([package, *inside.split("/")]).rstrip(".")
    return None


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Names that a Python file imports, wherever in it; `from a import b` gives `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


@cache
def files_of(path: Path) -> frozenset[Path]:
    """A test file and all of the test suite's own modules that it uses, the `conftest.py` beside it included."""
    found: set[Path] = set()
    ahead = [path, path.parent / "conftest.py"]
    while ahead:
        file = ahead.pop()
        if file not in found and file.exists():
            found.add(file)
            ahead += [folder / f"{name}.py" for folder in (ROOT / "tests", path.parent) for name in imports_of(file)]
    return frozenset(found)


def distances(changed: Iterable[str]) -> dict[str, int]:
    """Imports between each product module and the nearest changed one, which itself has 0; others are left out."""
    import grimp

    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    ring = {module for path in changed if (module := module_of(path)) in graph.modules}
    found: dict[str, int] = {}
    while ring:
        found |= dict.fromkeys(ring, max(found.values(), default=-1) + 1)
        ring = {user for module in ring for user in graph.find_modules_that_directly_import(module)} - found.keys()
    return found


def file_distance(path: Path, changed: set[str], modules: dict[str, int]) -> int | None:
    """Imports between a test file and the nearest change; 0 if it has changed itself, None if it reaches no change."""
    near = [0 for file in files_of(path) if str(file.relative_to(ROOT)) in changed]
    near += [1 + modules[name] for file in files_of(path) for name in imports_of(file) if name in modules]
    return min(near, default=None)


def choose(tests: Iterable[tuple[str, str]], near: dict[str, int], times: dict[str, FileTimes]) -> set[tuple[str, str]]:
    """The tests to run.

    First the fastest tests of every file, within `CORE` seconds, then those of the nearest files, within `BUDGET`. A file's
    fixtures are counted once, with its first test.

    Args:
        tests: file and name of all tests.
        near: distance of the test files that reach a change.
        times: what was measured.

    Returns:
        File and name of those that run.
    """
    chosen: set[tuple[str, str]] = set()
    files: set[str] = set()
    spent = 0.0

    def seconds(test: tuple[str, str]) -> float:
        file, name = test
        known = times.get(file, FileTimes())
        return known.tests.get(name, UNKNOWN) + (0.0 if file in files else known.setup)

    def take(candidates: Iterable[tuple[str, str]], until: float) -> None:
        nonlocal spent
        for test in candidates:
            if test not in chosen and spent + seconds(test) <= until:
                spent += seconds(test)
                chosen.add(test)
                files.add(test[0])

    tests = sorted(tests, key=lambda test: (seconds(test), test))
    take(tests, CORE)
    take(sorted((t for t in tests if t[0] in near), key=lambda t: near[t[0]]), BUDGET)
    return chosen
