"""Groups that no training step can be made with: found, set aside with the reason, and the run goes on."""

from __future__ import annotations

import pytest
from relax_server.roles.poison import BEARABLE, check_bearable, poisoned

from relax_sdk.errors import JournalError, MediaError, RunError, TokenError, TrainingError
from relax_sdk.trajectory import Group

GROUPS = [Group(f"g{i}", "test-v0", i, []) for i in range(4)]


def attempt(errors: dict[int, Exception]):
    def one(index: int) -> None:
        if index in errors:
            raise errors[index]

    return one


def test_the_groups_that_fail_alone_are_found_with_their_reasons() -> None:
    errors: dict[int, Exception] = {1: TokenError("3 placeholders"), 3: MediaError("cut file")}
    assert poisoned(GROUPS, attempt(errors)) == {"g1": "TokenError: 3 placeholders", "g3": "MediaError: cut file"}
    assert poisoned(GROUPS[:1], attempt({0: TrainingError("not finite")})) == {"g0": "TrainingError: not finite"}


def test_where_no_group_is_to_blame_none_is_set_aside() -> None:
    assert poisoned(GROUPS, attempt({})) == {}
    broken_weights: dict[int, Exception] = {i: TrainingError("the gradient is not finite") for i in range(4)}
    assert poisoned(GROUPS, attempt(broken_weights)) == {}


def test_other_errors_are_not_the_groups() -> None:
    with pytest.raises(JournalError):
        poisoned(GROUPS, attempt({2: JournalError("disk full")}))


def test_too_many_end_the_run() -> None:
    check_bearable(BEARABLE, BEARABLE, "")
    check_bearable(20, 200, "")
    with pytest.raises(RunError, match=r"21 of 200 groups(?s:.)*cut file"):
        check_bearable(21, 200, "MediaError: cut file")
