"""Work that is tried again: after which errors, how often, and with what pauses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from relax_sdk.retrying import Passing, growing_pauses, retry_after, retrying, retrying_in_thread


class Busy(Exception):
    """An error that may pass; `asked` is what a server asks to wait."""

    def __init__(self, asked: float = 0.0) -> None:
        super().__init__("busy")
        self.retry_after = asked


class Work:
    """Raises what it is given, one error a try, and returns how often it was tried when there is none left."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.tries = list(errors), 0

    def plain(self) -> int:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.tries

    async def later(self) -> int:
        return self.plain()


Carry = Callable[..., Any]


def in_thread(work: Work, passing: Passing, **rules: Any) -> Any:
    return retrying_in_thread(passing, rules.pop("first_pause", 0.5), **rules)(work.plain)


def in_asyncio(work: Work, passing: Passing, **rules: Any) -> Any:
    async def main() -> Any:
        return await retrying(passing, rules.pop("first_pause", 0.5), **rules)(work.later)

    return asyncio.run(main())


carried = pytest.mark.parametrize("carry", [in_thread, in_asyncio])


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each pause; none is waited."""
    waited: list[float] = []

    async def pause(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr("asyncio.sleep", pause)
    return waited


def test_pauses_are_doubled_up_to_the_longest_and_jitter_takes_up_to_half() -> None:
    made = [list(itertools.islice(growing_pauses(0.5, 6.0), 7)) for _ in range(50)]
    for number, most in enumerate([0.5, 1.0, 2.0, 4.0, 6.0, 6.0, 6.0]):
        column = [pauses[number] for pauses in made]
        assert all(most / 2 <= pause <= most for pause in column) and len(set(column)) > 1


@carried
def test_what_passes_is_tried_again(carry: Carry, pauses: list[float]) -> None:
    assert carry(Work(Busy(), Busy(), Busy()), Busy) == 4
    assert len(pauses) == 3 and all(most / 2 <= pause <= most for pause, most in zip(pauses, [0.5, 1.0, 2.0], strict=True))


@carried
def test_a_function_may_say_which_errors_pass(carry: Carry, pauses: list[float]) -> None:
    def twice(error: BaseException) -> bool:
        return isinstance(error, Busy) and len(pauses) < 2

    work = Work(Busy(), Busy(), Busy(), Busy())
    with pytest.raises(Busy):
        carry(work, twice)
    assert work.tries == 3 and len(pauses) == 2


@carried
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_any_other_error_is_raised_as_it_is(carry: Carry, error: BaseException, pauses: list[float]) -> None:
    work = Work(Busy(), error)
    with pytest.raises(type(error)) as caught:
        carry(work, Busy)
    assert caught.value is error and work.tries == 2


@carried
def test_tries_come_to_an_end(carry: Carry, pauses: list[float]) -> None:
    last = Busy()
    work = Work(Busy(), Busy(), last, Busy())
    with pytest.raises(Busy) as caught:
        carry(work, Busy, attempts=3)
    assert caught.value is last and work.tries == 3 and len(pauses) == 2


@carried
def test_no_pause_begins_that_would_end_too_late(carry: Carry, pauses: list[float]) -> None:
    work = Work(*(Busy() for _ in range(9)))
    with pytest.raises(Busy):
        carry(work, Busy, seconds=100.0, first_pause=60.0, longest_pause=1000.0)  # jitter takes up to half
    assert all(pause < 100.0 for pause in pauses) and 2 <= work.tries <= 3
    once = Work(Busy())
    with pytest.raises(Busy):
        carry(once, Busy, seconds=0.0)
    assert once.tries == 1


@carried
def test_a_server_that_asks_for_a_longer_pause_has_it(carry: Carry, pauses: list[float]) -> None:
    assert carry(Work(Busy(7.0), Busy(0.01)), Busy) == 3
    assert pauses[0] == 7.0 and 0.5 <= pauses[1] <= 1.0


def test_what_a_server_asks_for_is_seconds_and_limited() -> None:
    asked = [retry_after({"Retry-After": value}) for value in ("7", "600", "", "soon", "-3", "Wed, 21 Oct 2026 07:28:00 GMT")]
    assert asked == [7.0, 60.0, 0.0, 0.0, 0.0, 0.0]
    assert retry_after({}) == 0.0 and retry_after({"Retry-After": "600"}, 8.0) == 8.0


async def test_cancelling_ends_a_pause_at_once() -> None:
    tried = asyncio.Event()

    async def work() -> None:
        tried.set()
        raise Busy(1000.0)

    carrying = asyncio.ensure_future(retrying(Busy, 0.5)(work))
    await tried.wait()
    carrying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(carrying, 5.0)


async def test_cancelling_ends_a_try_at_once() -> None:
    began, tries = asyncio.Event(), 0

    async def work() -> None:
        nonlocal tries
        tries += 1
        began.set()
        await asyncio.Event().wait()

    carrying = asyncio.ensure_future(retrying(Busy, 0.5)(work))
    await began.wait()
    carrying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(carrying, 5.0)
    assert tries == 1
