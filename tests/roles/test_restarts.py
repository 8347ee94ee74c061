"""How often a role may be started again."""

import pytest
from relax_server.roles.restarts import MAX_IN_VAIN, MAX_RESTARTS, RESTART_WINDOW, Restarts

from relax_sdk.errors import RunError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_restart_too_many_ends_the_run_and_says_how_to_go_on():
    restarts = Restarts("relax train --resume runs/a", Clock())
    for _ in range(MAX_RESTARTS):
        restarts.count("engine", "out of memory")
    with pytest.raises(RunError, match=r"engine ended 6 times(?s:.)*out of memory(?s:.)*relax train --resume runs/a"):
        restarts.count("engine", "out of memory")


def test_roles_are_counted_apart():
    restarts = Restarts("", Clock())
    for _ in range(MAX_RESTARTS):
        restarts.count("engine", "")
        restarts.count("policy", "")


def test_what_happened_long_ago_does_not_count():
    clock = Clock()
    restarts = Restarts("", clock)
    for _ in range(4 * MAX_RESTARTS):
        restarts.count("engine", "")
        clock.now += RESTART_WINDOW / MAX_RESTARTS + 1


def test_restarts_without_progress_end_the_run_however_slow_they_are():
    clock = Clock()
    restarts = Restarts("relax train --resume runs/a", clock)
    restarts.went_on("policy")

    def again(role: str) -> None:
        clock.now += RESTART_WINDOW
        restarts.count(role, "the same groups again")

    for _ in range(3 * MAX_IN_VAIN):  # it gets further each time
        again("policy")
        restarts.went_on("policy")
    for _ in range(3 * MAX_IN_VAIN):  # nothing says what progress of this one would be
        again("engine")
    for _ in range(MAX_IN_VAIN):
        again("policy")
    with pytest.raises(RunError, match=r"policy ended 11 times without getting any further(?s:.)*--resume"):
        again("policy")
