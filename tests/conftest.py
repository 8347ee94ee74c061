"""Fixtures that the whole session shares, which tests may run beside each other, and which ones `make check` runs."""

import re
from collections import defaultdict
from pathlib import Path

import check_selection as selection
import pytest
from queue_cluster import ray_cluster, shared_queue

__all__ = ["ray_cluster", "shared_queue"]

RAY = {
    "test_bus_contract.py",
    "test_field_roles.py",
    "test_ray.py",
    "test_ray_machines.py",
    "test_transfer_queue.py",
    "test_transfer_queue_defects.py",
}
"""They look at what is left of Ray on the whole machine, so that one worker has them all."""
RANKS = {
    "test_data_parallel.py",
    "test_host_memory.py",
    "test_layout_table.py",
    "test_layouts.py",
    "test_lora_layouts.py",
    "test_plan_table.py",
    "test_step_tokens.py",
}
"""They share the processes that are ranks, so that one worker has them all."""
ENGINES = "contract/test_engine_"
"""They share the engines, so that one worker has them all, too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("relax gym")
    group.addoption("--near", metavar="COMMIT", help="run the tests nearest to what has changed since COMMIT, and the fastest")
    group.addoption("--write-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The tests of a file share its fixtures, and stay on one worker. First, as pytest-xdist reads the groups then."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item.path)))


def _group(path: Path) -> str:
    if path.name in RAY:
        return "ray"
    if path.name in RANKS:
        return "ranks"
    return str(path.parent) if ENGINES in path.as_posix() else str(path)


@pytest.hookimpl(trylast=True, specname="pytest_collection_modifyitems")
def pytest_keep_what_is_near(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--near`, leave out what does not fit into the time. Last, after those that the markers leave out."""
    base = config.getoption("--near")
    if base is None:
        return
    changed = selection.changed_files(base)
    modules = selection.distances(changed)
    near = {}
    for path in {item.path for item in items}:
        distance = selection.file_distance(path, changed, modules)
        if distance is not None:
            near[str(path.relative_to(selection.ROOT))] = distance
    by_key = {_key(item.nodeid): item for item in items}
    chosen = selection.choose(by_key, near, selection.read_times())
    kept = [item for key, item in by_key.items() if key in chosen]
    config.hook.pytest_deselected(items=[item for key, item in by_key.items() if key not in chosen])
    items[:] = kept


def _key(nodeid: str) -> tuple[str, str]:
    """File and name of a test; pytest-xdist puts its group, `ray`, `ranks` or an absolute path, behind an `@`."""
    file, name = nodeid.split("::", 1)
    return file, re.sub(r"@(ray|ranks|/.*)$", "", name)


class Durations:
    """Adds up what tests and their fixtures take, and writes it at the end."""

    def __init__(self) -> None:
        self.times: dict[str, selection.FileTimes] = defaultdict(selection.FileTimes)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, name = _key(report.nodeid)
        if report.when == "call":
            self.times[file].tests[name] = report.duration
        else:
            self.times[file].setup += report.duration

    def pytest_sessionfinish(self) -> None:
        selection.write_times(self.times)
