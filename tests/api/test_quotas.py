"""Quotas by themselves: places, groups that begin, and tokens."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from relax_server.api.background import LOOK, LULL, REQUESTS, ROUNDS, Background
from relax_server.api.keys import Key
from relax_server.api.quotas import MEDIA_BYTES, TOKENS, WORKER_SECONDS, AskedSlot, FairSlots, KeyMeter, KeyRates, Quota
from relax_server.api.rollout_store import Rollout
from relax_server.api.starts import WITH_PAUSED, GroupStarts
from relax_server.gateway.errors import ApiError
from sample_groups import ManualClock


class Counted(asyncio.Future[None]):
    """A future that counts how often any was compared with another."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return self is other

    __hash__ = asyncio.Future.__hash__


@pytest.mark.parametrize("backwards", [True, False])
async def test_giving_up_costs_the_same_however_many_wait(monkeypatch: pytest.MonkeyPatch, backwards: bool) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "create_future", Counted, raising=False)
    slots, n = FairSlots(1), 2000
    await slots.acquire("a", 10)
    waiting = [asyncio.create_task(slots.acquire("a", 10)) for _ in range(n)]
    await asyncio.sleep(0)
    assert slots.waiting == n
    Counted.comparisons = 0
    for task in reversed(waiting) if backwards else waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert Counted.comparisons <= n and not slots.waiting
    slots.release("a")
    assert not slots.running and slots.taken == 0


async def test_a_place_that_comes_at_the_moment_of_giving_up_goes_to_the_next() -> None:
    slots = FairSlots(1)
    await slots.acquire("a", 1)
    first, second = (asyncio.create_task(slots.acquire("a", 1)) for _ in range(2))
    await asyncio.sleep(0)
    slots.release("a")  # it is the first one's now, who has not heard of it
    first.cancel()
    await second
    assert first.cancelled() and slots.running["a"] == 1 == slots.taken


async def test_a_place_is_counted_from_when_it_is_asked_for() -> None:
    slots = FairSlots(1)
    one, two = AskedSlot(slots, "a", 4, slots.ask("a", 4)), AskedSlot(slots, "a", 4, slots.ask("a", 4))
    assert slots.asked("a") == 2 and slots.running["a"] == 1
    await one.acquire()
    one.drop()
    assert slots.running["a"] == 1, "what was acquired is not given up"
    two.drop()
    assert slots.asked("a") == 1
    one.release()
    await one.acquire()
    one.release()
    assert not slots.running and not slots.waiting


def rollout(id: str) -> Rollout:
    return Rollout(id, "key_a", {}, "running", {}, None, 0.0)


def begun(starts: GroupStarts, it: Rollout, key: Key, size: int) -> asyncio.Task[None]:
    return asyncio.create_task(starts.begin(it, key, size))


async def test_groups_begin_while_their_key_has_places() -> None:
    key, starts = Key("key_a", "a", frozenset(), episodes=8, tokens_per_minute=1), GroupStarts(4096)
    one, other = rollout("one"), rollout("other")
    tasks = [begun(starts, it, key, 3) for it in (one, one, other, one, other)]
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, True, True, False, False]  # 9 episodes for 8 places
    starts.end(one, 3)
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, True, True, True, False]


async def test_a_group_larger_than_what_its_key_may_have_begins_alone() -> None:
    key, starts = Key("key_a", "a", frozenset(), episodes=8, tokens_per_minute=1), GroupStarts(4096)
    it = rollout("one")
    first, second = begun(starts, it, key, 4096), begun(starts, it, key, 4096)
    await asyncio.sleep(0)
    assert first.done() and not second.done()
    starts.end(it, 4096)
    await second
    starts.end(it, 4096)
    starts.forget(it)


async def test_a_paused_rollout_leaves_room_for_others_and_gets_none_that_is_endless() -> None:
    key, starts = Key("key_a", "a", frozenset(), episodes=8, tokens_per_minute=1), GroupStarts(4096)
    one, other = rollout("one"), rollout("other")
    await starts.begin(one, key, 8)
    waiting = begun(starts, other, key, 8)
    await asyncio.sleep(0)
    assert not waiting.done()
    starts.pause(one)
    await waiting
    starts.pause(other)
    more = [begun(starts, rollout(str(n)), key, 8) for n in range(WITH_PAUSED)]
    await asyncio.sleep(0)
    assert [task.done() for task in more] == [True, False, False, False]
    starts.unpause(one)
    starts.end(one, 8)
    starts.end(other, 8)
    await asyncio.sleep(0)
    assert [task.done() for task in more] == [True, False, False, False], "the first of them has all places"
    for task in more:
        task.cancel()
    await asyncio.gather(*more, return_exceptions=True)


def tokens(per_minute: int) -> tuple[ManualClock, KeyRates, Key]:
    clock = ManualClock(0.0)
    return clock, KeyRates(TOKENS, clock), Key("k", "k", frozenset(), 1, tokens_per_minute=per_minute)


async def test_calls_that_are_sent_together_are_held_to_the_quota() -> None:
    _, rates, key = tokens(60)
    meter = KeyMeter(rates, key)
    await meter.reserve(30)
    await meter.reserve(30)
    with pytest.raises(ApiError, match="used its 60 tokens a minute") as caught:
        await meter.reserve(1)
    assert caught.value.status == 429
    meter.give_back(20)
    await meter.reserve(1)


@pytest.mark.parametrize("quota", [TOKENS, MEDIA_BYTES, WORKER_SECONDS], ids=lambda quota: quota.name)
def test_a_quota_is_whole_again_after_its_span_and_never_more(quota: Quota) -> None:
    clock, key = ManualClock(0.0), Key("k", "k", frozenset(), 1, 100, media_bytes_per_day=100, worker_seconds_per_hour=100)
    rates, other = KeyRates(quota, clock), Key("o", "o", frozenset(), 1, 100)
    rates.take(key, 100)
    with pytest.raises(ApiError) as caught:
        rates.check(key)
    rates.check(other)
    assert (caught.value.status, caught.value.code) == (429, quota.name) and caught.value.headers == {"Retry-After": "1"}
    clock.advance(5 * quota.seconds)
    rates.take(key, 99.5)
    rates.check(key)
    rates.take(key, 100.5)
    clock.advance(0.99 * quota.seconds)
    with pytest.raises(ApiError):
        rates.check(key)
    clock.advance(0.02 * quota.seconds)
    rates.check(key)


async def test_a_patient_call_waits_for_tokens_in_the_order_of_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_server.api.quotas.LOOK_SECONDS", 0.0)
    clock, rates, key = tokens(60)
    meter, order = KeyMeter(rates, key, Background(), urgent=False), list[str]()

    async def call(name: str, size: int) -> None:
        await meter.reserve(size)
        order.append(name)

    await call("first", 90)
    waiting = [asyncio.create_task(call(name, 60)) for name in ("second", "third")]

    async def looks() -> None:
        for _ in range(10 * ROUNDS):
            await asyncio.sleep(0)

    await looks()
    assert order == ["first"]
    clock.advance(31)
    await looks()
    assert order == ["first", "second"]
    meter.give_back(60)  # the second has generated nothing
    await looks()
    assert order == ["first", "second", "third"]
    await asyncio.gather(*waiting)


async def test_work_in_the_background_begins_one_piece_in_some_rounds_each_key_in_its_turn() -> None:
    background, begun, rounds = Background(), list[tuple[str, int]](), 0

    async def work(key: str) -> None:
        await background.turn(key)
        begun.append((key, rounds))

    tasks = [asyncio.create_task(work(key)) for key in "aaaaaabbc"]
    while len(begun) < len(tasks):
        await asyncio.sleep(0)
        rounds += 1
    assert "".join(key for key, _ in begun) == "abcabaaaa"
    assert {later - sooner for (_, sooner), (_, later) in itertools.pairwise(begun)} == {ROUNDS}


async def test_what_was_given_up_takes_no_turn_in_the_background() -> None:
    background = Background()
    tasks = [asyncio.create_task(background.turn("a")) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[:4]:
        task.cancel()
    for _ in range(ROUNDS + 1):
        await asyncio.sleep(0)
    assert tasks[4].done() and not background._waiting
    await asyncio.wait_for(background.turn("b"), 5)


async def test_while_the_loop_is_late_work_in_the_background_begins_for_some_requests_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    background, begun, requests = Background(), 0, 0
    now = 0.0
    # The event loop's clock, too, is the test's own: a process that gets no core for a while changes nothing.
    monkeypatch.setattr(time, "monotonic", lambda: now)

    async def work() -> None:
        nonlocal begun
        while True:
            await background.turn("a")
            begun += 1

    working = asyncio.create_task(work())
    while requests < 20 * REQUESTS:
        background.make_way()
        requests += 1
        now += 2 * LOOK  # the loop is late
        for _ in range(2 * ROUNDS):
            await asyncio.sleep(0)
    assert 0 < begun <= requests / REQUESTS + 1
    began = begun
    for _ in range(100):  # late, too, and nobody asks
        now += LULL / 50
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
    assert begun > began + 50
    working.cancel()
