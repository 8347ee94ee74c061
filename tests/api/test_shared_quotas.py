"""One quota for all workers of a service, whichever of them ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from relax_server.api.keys import Key, KeyRing
from relax_server.api.quotas import TOKENS, FairSlots, KeyRates
from relax_server.api.workers import quotas
from relax_server.api.workers.quotas import SharedRates, shared_slots
from relax_server.gateway.errors import ApiError
from relax_server.journal.sql import SqlJournal
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from sample_groups import ManualClock
from scripted_server import ScriptedServer
from service_process import start as start_service
from worker_places import Workers, workers_in_one_loop

WAIT, TOTAL = 20.0, 100
KEY = Key("key_a", "alice", frozenset({"run"}), episodes=10, tokens_per_minute=6000)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setattr(quotas, "AGAIN_SECONDS", 0.01)
    with workers_in_one_loop(3) as it:
        yield it


def start(workers: Workers, number: int) -> FairSlots:
    """Start a worker; returns the places as it sees them."""
    slots = shared_slots(TOTAL, workers.place(number)[0])
    workers.begin(number)
    return slots


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def soon(what: Awaitable[None]) -> None:
    async with asyncio.timeout(WAIT):
        await what


async def test_a_key_has_no_more_places_over_all_workers(workers: Workers) -> None:
    each, running, most, played = [start(workers, number) for number in range(3)], 0, 0, 0

    async def episode(slots: FairSlots) -> None:
        nonlocal running, most, played
        place = slots.of(KEY.id, KEY.episodes)
        await place.acquire()
        running, played = running + 1, played + 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        place.release()

    async with asyncio.timeout(WAIT):
        await asyncio.gather(*(episode(slots) for slots in each for _ in range(30)))
    assert (most, played) == (10, 90)
    await until(lambda: each[0].taken == 0)
    assert not any(slots.running or slots.waiting for slots in each)


async def test_an_opening_is_refused_where_another_worker_has_all_places(workers: Workers) -> None:
    home, one, other = (start(workers, number) for number in range(3))
    async with asyncio.timeout(WAIT):
        opened = await asyncio.gather(
            *(slots.reserve(KEY) for slots in (home, one, other) for _ in range(6)), return_exceptions=True
        )
        refused = [answer for answer in opened if isinstance(answer, ApiError)]
        assert len(refused) == 8 and {(error.status, error.code) for error in refused} == {(429, "episodes")}
        assert home.asked(KEY.id) == 10
        for place in opened:
            if not isinstance(place, BaseException):
                place.drop()
        await until(lambda: home.taken == 0)
        again = await one.reserve(KEY)
        await again.acquire()
    assert (one.taken, home.taken, other.taken) == (1, 1, 0)


async def test_the_places_of_a_worker_that_was_killed_come_back(workers: Workers) -> None:
    home, one, other = (start(workers, number) for number in range(3))
    for _ in range(10):
        await soon(one.acquire(KEY.id, 10))
    waiting = [asyncio.create_task(slots.acquire(KEY.id, 10)) for slots in (one, other) for _ in range(5)]
    await until(lambda: home.waiting == 10)
    workers.kill(1)
    await soon(asyncio.wait_for(asyncio.gather(*waiting[5:]), WAIT))  # type: ignore[arg-type]
    assert home.taken == home.running[KEY.id] == other.taken == 5 and home.waiting == 0
    for task in waiting[:5]:
        task.cancel()


async def test_what_workers_play_is_kept_when_worker_0_is_started_again(workers: Workers) -> None:
    home, one, other = (start(workers, number) for number in range(3))
    for slots in (one, other):
        for _ in range(5):
            await soon(slots.acquire(KEY.id, 10))
    waiting = asyncio.create_task(one.acquire(KEY.id, 10))
    await until(lambda: home.waiting == 1)
    one.release(KEY.id)  # told to a worker 0 that is just ending
    workers.kill(0)
    other.release(KEY.id)  # told to nobody
    home = start(workers, 0)
    await soon(waiting)
    assert one.taken == 5 and other.taken == 4
    await until(lambda: home.taken == 9)
    assert home.running[KEY.id] == 9
    full = [asyncio.create_task(other.acquire(KEY.id, 10)) for _ in range(3)]
    await until(lambda: home.waiting == 2)
    assert home.taken == 10
    for task in full:
        task.cancel()
    await until(lambda: home.waiting == 0)
    assert home.taken == 10 and other.taken == 5


async def test_an_opening_is_answered_while_there_is_no_worker_0(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "OPENING_SECONDS", 0.1)
    one = start(workers, 1)
    async with asyncio.timeout(WAIT):
        with pytest.raises(ApiError, match="does not answer just now") as caught:
            await one.reserve(KEY)
        assert caught.value.status == 503
        playing = asyncio.create_task(one.acquire(KEY.id, 10))  # no client waits for that
        home = start(workers, 0)
        await playing
    assert home.taken == one.taken == 1


@pytest.mark.parametrize("seed", range(4))
async def test_giving_up_at_any_moment_leaves_nothing_taken(workers: Workers, seed: int) -> None:
    dice, each = random.Random(seed), [start(workers, number) for number in range(3)]

    async def episode(slots: FairSlots, key: str) -> None:
        await slots.acquire(key, 3)
        try:
            await asyncio.sleep(dice.random() * 0.005)
        finally:
            slots.release(key)

    tasks = [asyncio.create_task(episode(dice.choice(each), dice.choice("ab"))) for _ in range(200)]
    while left := [task for task in tasks if not task.done()]:
        for task in dice.sample(left, len(left) // 3):
            task.cancel()
        for _ in range(dice.randrange(4)):
            await asyncio.sleep(0)
        assert each[0].running["a"] <= 3 and each[0].running["b"] <= 3
        await asyncio.sleep(0.002)
    await until(lambda: each[0].taken == 0)
    assert not any(slots.running or slots.waiting for slots in each)


async def test_tokens_of_all_workers_are_counted_within_the_bound(workers: Workers) -> None:
    """Bound: what begins at N workers at the same moment takes at most N buckets and N calls, and is paid back by all."""
    clock, call = ManualClock(), 500
    each = []
    for number in range(3):
        rates = KeyRates(TOKENS, clock)
        SharedRates(workers.place(number)[0], [rates])
        workers.begin(number)
        each.append(rates)

    def spend(rates: KeyRates) -> int:
        spent = 0
        while True:
            try:
                rates.charge(KEY, call)
            except ApiError:
                return spent
            spent += call

    at_once = sum(map(spend, each))
    assert at_once == 3 * KEY.tokens_per_minute
    levels = lambda: [rates._level(KEY)[0] for rates in each]
    await until(lambda: levels() == [-2.0 * KEY.tokens_per_minute] * 3)
    for _ in range(2):
        assert sum(map(spend, each)) == 0
        clock.advance(60)
    clock.advance(10)
    assert spend(each[1]) == 1000, "a minute's worth is due again after three minutes, as with one worker"
    await until(lambda: levels() == [0.0] * 3)
    assert spend(each[0]) == 0
    each[0].take(KEY, -300)
    await until(lambda: levels() == [300.0] * 3)


@pytest.mark.nightly
def test_processes_share_the_places_of_a_key_whichever_of_them_is_killed(tmp_path: Path) -> None:
    journal = SqlJournal(tmp_path / "journal.db")
    secret, _ = KeyRing(journal).create("alice", ["run"], episodes=KEY.episodes)
    journal.close()
    engine = ScriptedServer(Processor.load(resolve_model("relax/tiny-omni")))
    engine.start()
    engine.repeats("A")
    service = start_service(tmp_path, "--workers", "2", "--engine", engine.url, "--drain-seconds", "0", key=secret)
    open_: list[str] = []

    def fill(asking: int = 3 * KEY.episodes) -> int:
        """Open sessions all at once; returns how many were refused."""

        def one(_: int) -> int:
            while True:
                with service.client() as client, contextlib.suppress(httpx.TransportError):
                    answer = client.post("/v1/sessions", json={})
                    if answer.status_code != 503:
                        assert answer.status_code in (201, 429), answer.text
                        if answer.status_code == 201:
                            open_.append(answer.json()["id"])
                        return answer.status_code
                time.sleep(0.1)

        with ThreadPoolExecutor(asking) as threads:
            return list(threads.map(one, range(asking))).count(429)

    def kill(worker: int) -> None:
        """Kill a worker, and wait until it is back."""
        children = psutil.Process(service.process.pid).children()
        [process for process in children if "relax_server.api.workers.process" in process.cmdline()][worker].kill()
        end = time.monotonic() + 60
        with service.client() as client:
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"/v1/sessions/s_{f'{worker}.' if worker else ''}ab").status_code == 404:
                        break
                assert time.monotonic() < end
                time.sleep(0.1)
        open_[:] = [id for id in open_ if ("." in id) != bool(worker)]

    try:
        assert fill() == 2 * KEY.episodes and len(open_) == KEY.episodes
        assert {"." in id for id in open_} == {True, False}
        for worker in (1, 0):
            kill(worker)
            assert 0 < len(open_) < KEY.episodes
            fill()
            assert len(open_) == KEY.episodes
    finally:
        service.stop()
        engine.stop()
