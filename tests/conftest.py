"""Fixtures that the whole session shares, and which tests may run beside each other (`make test` has two workers)."""

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file share its fixtures, and stay on one worker. First, as pytest-xdist reads the groups then."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if item.path.name in RAY else str(item.path)))
