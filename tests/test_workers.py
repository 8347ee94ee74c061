"""How `make test` shares the tests between its workers."""

import pytest


def test_the_tests_of_a_file_stay_on_one_worker(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", False):
        pytest.skip("only with `-n 2 --dist loadgroup`, as `make test` has it")
    # pytest-xdist shares tests by what it adds to their names; with pytest 9.2 it adds it without effect
    assert request.node.nodeid.endswith(f"@{request.path}")
