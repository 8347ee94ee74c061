"""Threads that keys share: each in its turn, none may take them all, and too much is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
from relax_server.gateway.errors import as_api_error
from relax_server.rollout import fair_threads
from relax_server.rollout.fair_threads import FairThreads
from rollout_bench import until

from relax_sdk.errors import ServiceUnavailable


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """An event that blocked work waits for."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
async def fair() -> AsyncIterator[FairThreads]:
    made = FairThreads("test", 2)
    yield made
    made.close()


def start(fair: FairThreads, key: str, function: Callable[[], object], size: int = 1) -> asyncio.Task[object]:
    return asyncio.create_task(fair.of(key).call(size, function))


async def test_one_key_never_takes_all_threads(fair: FairThreads, released: threading.Event) -> None:
    slow = [start(fair, "a", released.wait) for _ in range(20)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(fair.of("b").call(1, lambda: "done"), 30) == "done", "while all of a's work is blocked"
    assert fair.waiting == 19
    released.set()
    assert await asyncio.gather(*slow) == [True] * 20
    await until(lambda: fair.waiting == 0)


async def test_keys_are_served_in_turn(released: threading.Event) -> None:
    fair, order = FairThreads("test", 1), list[str]()
    first = start(fair, "a", released.wait)
    work = [start(fair, key, lambda key=key: order.append(key)) for key in "aaabbbc"]
    await asyncio.sleep(0)
    released.set()
    await asyncio.gather(first, *work)
    fair.close()
    assert "".join(order) == "abcabab"


async def test_too_much_of_one_key_is_refused_and_that_of_others_is_not(
    fair: FairThreads, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_threads, "MOST_WAITING", 3)
    monkeypatch.setattr(fair_threads, "MOST_BYTES", 1000)
    held = [start(fair, "a", released.wait, 5000)]  # one is taken whatever its size, or it could never be
    await asyncio.sleep(0)
    with pytest.raises(ServiceUnavailable, match="5000 bytes") as caught:
        await fair.of("a").call(1, print)
    told = as_api_error(caught.value)
    assert (told.status, told.code, told.headers) == (429, "busy", {"Retry-After": "1"})
    held += [start(fair, "b", released.wait) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(ServiceUnavailable, match="allowed: 3"):
        await fair.of("b").call(1, print)
    assert fair.refused == 2
    answer = start(fair, "b", lambda: "an answer that was generated", 0)
    released.set()
    await asyncio.gather(*held)
    assert await answer == "an answer that was generated"


async def test_a_thread_is_free_when_its_work_has_ended_and_not_when_nobody_waits_for_it_any_more(
    fair: FairThreads, released: threading.Event
) -> None:
    begun, second = threading.Event(), threading.Event()
    running = start(fair, "a", lambda: begun.set() or released.wait())
    await until(begun.is_set)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    after = start(fair, "a", second.set)
    await asyncio.wait_for(fair.of("b").call(1, lambda: None), 30)
    assert not second.is_set(), "a's thread is still at work"
    released.set()
    await after
    assert second.is_set()


async def test_who_gives_up_waiting_takes_no_thread(fair: FairThreads, released: threading.Event) -> None:
    first, called = start(fair, "a", released.wait), list[int]()
    waiting = [start(fair, "a", lambda: called.append(1)) for _ in range(5)]
    await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    released.set()
    await first
    assert await fair.of("a").call(1, lambda: "next") == "next"
    assert not called and fair.waiting == 0
