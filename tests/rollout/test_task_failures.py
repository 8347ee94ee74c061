"""Failed attempts are counted by the row of the task, which comes again under other indices."""

from __future__ import annotations

from relax_server.rollout.task_failures import WORST, TaskFailures


def test_attempts_of_one_row_count_together():
    failures = TaskFailures(tasks=4)
    for index in range(12):
        failures.count(index, failures=2 if index % 4 == 1 else 0)
    assert failures.worst == [(1, 6)]
    assert (failures.played, failures.failing, failures.attempts) == (4, 1, 6)


def test_only_the_worst_are_named_and_all_are_counted():
    failures = TaskFailures(tasks=None)
    for index in range(2 * WORST):
        failures.count(index, failures=index)
    assert failures.worst == [(9, 9), (8, 8), (7, 7), (6, 6), (5, 5)]
    assert (failures.played, failures.failing, failures.attempts) == (10, 9, 45)
