"""What `make check` runs after a change."""

from pathlib import Path

import check_selection as selection
import pytest
from check_selection import FileTimes, choose


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("relax_sdk/env.py", "relax_sdk.env"),
        ("relax_sdk/client/__init__.py", "relax_sdk.client"),
        ("relax_sdk/__init__.py", "relax_sdk"),
        ("server/relax_server/journal/sql.py", "relax_server.journal.sql"),
        ("envs/relax_envs/__init__.py", "relax_envs"),
        ("tests/conftest.py", None),
        ("relax_sdk/py.typed", None),
    ],
)
def test_product_files_have_import_names(path: str, module: str | None):
    assert selection.module_of(path) == module


def test_those_who_import_a_changed_module_are_near():
    near = selection.distances({"server/relax_server/journal/leases.py", "docs/index.md"})
    assert near["relax_server.journal.leases"] == 0 and near["relax_server.journal.sql"] == 1
    assert near["relax_server.roles.launch"] > 1 and "relax_server.training.forest" not in near


def test_a_test_is_near_through_the_modules_it_imports_and_its_own_helpers():
    here = Path(__file__)
    assert selection.file_distance(here, {"tests/test_check_selection.py"}, {}) == 0
    assert selection.file_distance(here, {"tests/check_selection.py"}, {}) == 0
    assert selection.file_distance(here, {"tests/black_box.py"}, {}) is None
    contract = here.parent / "contract" / "test_journal_leases.py"
    assert selection.file_distance(contract, set(), {"relax_server.journal": 2}) == 3


def test_the_nearest_tests_come_first_and_the_fastest_of_all_files_run_anyway():
    times = {"slow.py": FileTimes(30.0, {"a": 50.0, "b": 20.0}), "far.py": FileTimes(0.0, {"x": 45.0})}
    tests = [("slow.py", "a"), ("slow.py", "b"), ("far.py", "x"), ("far.py", "y"), ("new.py", "z")]
    fastest = {("far.py", "y"), ("new.py", "z")}
    assert choose(tests, {}, times) == fastest
    assert choose(tests, {"slow.py": 1}, times) == fastest | {("slow.py", "b"), ("slow.py", "a")}
    assert choose(tests, {"slow.py": 1, "far.py": 0}, times) == fastest | {("far.py", "x"), ("slow.py", "b")}
