"""Callers that are refused again and again are slowed down, and nobody else is."""

from __future__ import annotations

import asyncio

import pytest
from relax_server.api.door import refusals
from relax_server.api.door.pace import PacedRefusals
from relax_server.api.door.refusals import BURST_SECONDS, CALLERS, MOST_WAITING, Refusals
from relax_server.api.keys import MOST_KNOWN, KeyRing
from relax_server.gateway.errors import ApiError
from relax_server.journal.sql import SqlJournal
from service_inside import service_inside

BURST = int(10 * BURST_SECONDS)
"""Refusals at ten a second, until a caller is slowed."""


class Clock:
    """Seconds that pass when somebody sleeps, and the sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slept = 0.0, list[float]()
        monkeypatch.setattr(refusals.asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def __call__(self) -> float:
        return self.now


async def test_who_is_refused_too_often_goes_on_at_the_rate_of_its_refusals(monkeypatch) -> None:
    clock = Clock(monkeypatch)
    paced = Refusals(10, clock)
    for _ in range(1000):
        await paced.turn("guesser")
        paced.note("guesser")
        await paced.turn("honest")
    assert clock.now == pytest.approx((1000 - BURST) / 10, abs=1.0) and paced.slowed == pytest.approx(1000 - BURST, abs=10)
    clock.now += 2 * BURST_SECONDS
    n = len(clock.slept)
    await paced.turn("guesser")
    assert len(clock.slept) == n and not paced.slow, "it was not refused any more"


async def test_what_waits_is_bounded_and_the_next_ones_are_told_when_to_come_again() -> None:
    paced = Refusals(10, lambda: 0.0)
    for _ in range(BURST):
        paced.note("x")
    waiting = [asyncio.ensure_future(paced.turn("x")) for _ in range(MOST_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as caught:
        await paced.turn("x")
    assert caught.value.status == 429 and int(caught.value.headers["Retry-After"]) == round(MOST_WAITING / 10)
    await paced.turn("y")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert paced.readings()[1][3] == {"": 1.0}


def test_callers_are_forgotten_when_there_are_many() -> None:
    paced = Refusals(1, lambda: 0.0)
    for n in range(3 * CALLERS):
        for _ in range(5):
            paced.note(str(n))
    assert len(paced._callers) == CALLERS and len(paced.slow) == CALLERS


def test_guesses_do_not_make_a_key_forgotten_that_works(tmp_path) -> None:
    journal = SqlJournal(tmp_path / "journal.db")
    ring = KeyRing(journal)
    secret, key = ring.create("honest")
    other, to_end = ring.create("other")
    assert ring.find(secret) == key and ring.find(other) == to_end
    ring._known |= {str(n): (0.0, None) for n in range(MOST_KNOWN)}
    assert ring.find("a guess") is None and ring.seen(secret) == key and len(ring._known) == 3
    assert ring.revoke(to_end.id) and ring.seen(secret) == key and ring.seen(other) is None
    journal.close()


async def test_guesses_do_not_slow_a_key_of_the_same_address(processor, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(refusals, "BURST_SECONDS", 0.2)
    async with service_inside(processor, tmp_path) as it:
        secret, _ = it.core.keys.create("honest", episodes=1)
        it.core.locked, it.core.refusals.each_second = True, 1.0
        honest = {"Authorization": f"Bearer {secret}"}
        assert (await it.http.get("/v1/envs", headers=honest)).status_code == 200

        async def guess(n: int) -> int:
            return (await it.http.get("/v1/envs", headers={"Authorization": f"Bearer {n}"})).status_code

        assert await guess(0) == 401
        assert len(it.core.refusals.slow) == 1
        asked, find = list[str](), it.core.keys.find
        monkeypatch.setattr(it.core.keys, "find", lambda secret: asked.append(secret) or find(secret))
        guesses = [asyncio.ensure_future(guess(n)) for n in range(1, 1 + 2 * MOST_WAITING)]
        await asyncio.sleep(0.01)
        assert it.core.refusals.slowed == MOST_WAITING and not asked, "they wait before anything is looked up"
        assert (await it.http.get("/v1/envs", headers=honest)).status_code == 200
        turned_away = [task.result() for task in guesses if task.done()]
        assert set(turned_away) == {429} and len(turned_away) == MOST_WAITING
        assert (await it.http.get("/healthz")).status_code == 200
        assert f"relax_requests_slowed {MOST_WAITING}.0" in (await it.http.get("/metrics")).text
        for task in guesses:
            task.cancel()
        await asyncio.gather(*guesses, return_exceptions=True)


async def test_openings_beyond_the_quota_slow_no_open_session(processor, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(refusals, "BURST_SECONDS", 0.1)
    async with service_inside(processor, tmp_path) as it:
        secret, key = it.core.keys.create("greedy", episodes=1)
        it.core.locked, it.core.refusals.each_second = True, 1.0
        it.http.headers["Authorization"] = f"Bearer {secret}"
        session = await it.open()
        refused = [await it.http.post("/v1/sessions", json={}) for _ in range(2)]
        assert {answer.status_code for answer in refused} == {429} and it.core.refusals.slow == {f"{key.id} begins"}
        slowed = it.core.refusals.slowed
        assert (await it.http.get(f"/v1/sessions/{session['id']}")).status_code == 200
        assert it.core.refusals.slowed == slowed
        assert (await it.http.post("/v1/sessions", json={})).status_code == 429 and it.core.refusals.slowed == slowed + 1


async def test_addresses_of_one_network_are_one_caller(processor, tmp_path) -> None:
    async with service_inside(processor, tmp_path) as it:
        paced = PacedRefusals(it.core, it.core, it.hub)  # type: ignore[arg-type]

        def caller(address: str) -> str:
            return paced.caller({"type": "http", "path": "/", "headers": [], "client": (address, 1)})

        assert caller("10.0.0.1") != caller("10.0.0.2")
        assert caller("2001:db8::1") == caller("2001:db8::ffff:1") != caller("2001:db8:1::1")


async def test_what_a_socket_asks_for_in_vain_is_counted(processor, tmp_path) -> None:
    async with service_inside(processor, tmp_path) as it:
        from relax_server.api.keys import LOCAL
        from relax_server.api.routes.session_socket import SessionSocket, _Connection

        it.core.refusals.each_second = 1.0
        connection = _Connection(SessionSocket(it.core, it.hub), None, None, LOCAL)  # type: ignore[arg-type]
        for _ in range(int(BURST_SECONDS) + 1):
            assert "error" in await connection._answer(b'{"op": "nothing"}')
        assert it.core.refusals.slow == {LOCAL.id}
