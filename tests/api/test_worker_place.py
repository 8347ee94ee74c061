"""Workers of one service tell and ask each other things."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import pytest
from relax_server.api.workers.board import Board
from relax_server.api.workers.channel import INLINE, Message
from relax_server.api.workers.place import WorkerPlace, worker_of
from relax_server.gateway.errors import ApiError
from worker_places import workers_in_one_loop

from relax_sdk.errors import ConfigError

WAIT = 20.0


@pytest.fixture
async def places() -> AsyncIterator[list[WorkerPlace]]:
    """Three workers in one event loop."""
    with workers_in_one_loop(3) as workers:
        found = [workers.place(number)[0] for number in range(3)]
        for number in range(3):
            workers.begin(number)
        yield found


async def test_workers_tell_and_ask_each_other(places: list[WorkerPlace]) -> None:
    told: asyncio.Queue[Message] = asyncio.Queue()
    for place in places[1:]:
        place.on("news", told.put_nowait)
        place.on("add", lambda message: {"sum": sum(message.body["numbers"])})
    places[0].tell_others("news", what="héllo")
    async with asyncio.timeout(WAIT):
        first, second = await told.get(), await told.get()
        assert first.body == second.body == {"what": "héllo"} and first.sender == second.sender == 0
        assert await places[0].ask(1, "add", numbers=[1, 2]) == {"sum": 3}
        assert await places[0].ask_others("add", numbers=[4]) == {1: {"sum": 4}, 2: {"sum": 4}}
        long = "x" * (3 * INLINE)
        places[2].on("echo", lambda message: message.body)
        assert await places[1].ask(2, "echo", text=long) == {"text": long}


async def test_what_is_asked_of_oneself_is_answered_by_the_same_handler(places: list[WorkerPlace]) -> None:
    async def later(message: Message) -> dict[str, int]:
        await asyncio.sleep(0)
        return {"from": message.sender}

    places[0].on("who", later)
    alone = WorkerPlace()
    alone.on("who", later)
    async with asyncio.timeout(WAIT):
        assert await places[0].ask(0, "who") == {"from": 0}
        assert await places[2].ask(0, "who") == {"from": 2}
        assert await alone.ask(0, "who") == {"from": 0}
    assert alone.alone and alone.home and alone.others == []


async def test_errors_reach_whoever_asks(places: list[WorkerPlace]) -> None:
    def refuses(message: Message) -> None:
        raise ConfigError("port = 0; allowed: 1")

    async def breaks(message: Message) -> None:
        raise ZeroDivisionError

    places[1].on("refuses", refuses)
    places[1].on("breaks", breaks)
    async with asyncio.timeout(WAIT):
        with pytest.raises(ApiError, match="port = 0; allowed: 1") as refused:
            await places[0].ask(1, "refuses")
        assert refused.value.status == 400
        with pytest.raises(ApiError, match="it failed: ZeroDivisionError"):
            await places[0].ask(1, "breaks")


async def test_a_worker_that_is_not_there_is_not_waited_for(places: list[WorkerPlace]) -> None:
    asked = asyncio.Event()

    async def never(message: Message) -> None:
        asked.set()
        await asyncio.Event().wait()

    places[1].on("hangs", never)
    ended: list[int] = []
    places[0].when_ended(ended.append)
    async with asyncio.timeout(WAIT):
        with pytest.raises(ApiError, match="worker 1 of the service"):
            await places[0].ask(1, "hangs", seconds=0.05)
        asked.clear()
        waiting = asyncio.create_task(places[0].ask(1, "hangs", seconds=WAIT))
        await asked.wait()
        places[2].tell(0, "ended", worker=1)
        with pytest.raises(ApiError, match="worker 1 of the service"):
            await waiting
        assert ended == [1]
        places[0].board.set_up(1, False)
        with pytest.raises(ApiError) as refused:
            await places[0].ask(1, "hangs", seconds=WAIT)
        assert refused.value.status == 503 and refused.value.headers["Retry-After"]


async def test_an_inbox_that_nobody_reads_is_full_some_day(places: list[WorkerPlace]) -> None:
    places[1]._channel.close()  # type: ignore[union-attr]
    with pytest.raises(ApiError, match="worker 1 of the service"):
        for _ in range(1000):
            places[0].tell(1, "news", what="x" * 10_000)
    places[0].tell_others("news")  # which leaves it out


async def test_an_open_file_travels_with_a_long_message(places: list[WorkerPlace]) -> None:
    taken: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    places[1].on("connection", taken.set_result)
    one, other = socket.socketpair()
    data = os.urandom(4 * INLINE)
    with one, other:
        places[0]._channel.send(1, "connection", data, one.fileno())  # type: ignore[union-attr]
        one.close()
        async with asyncio.timeout(WAIT):
            message = await taken
        assert message.data == data and message.file is not None
        with socket.socket(fileno=message.file) as moved:
            moved.sendall(b"still open")
            assert other.recv(100) == b"still open"


def test_names_say_where_they_live() -> None:
    assert WorkerPlace().marked("ab12") == "ab12"
    assert WorkerPlace(3, 4).marked("ab12") == "3.ab12"
    assert [worker_of(name) for name in ("ab12", "3.ab12", "12", "", ".x", "-1.x", "٣.x", "9999.x")] == [0, 3, 0, 0, 0, 0, 0, 0]


def test_the_board_is_one_for_all() -> None:
    file = Board.make()
    one, other = Board(file), Board(file)
    os.close(file)
    one.set_up(2, True)
    one.set_sessions(2, 7)
    one.paused = True
    assert other.up(2) and other.sessions(2) == 7 and other.paused and not other.up(1)
    other.set_up(2, False)
    assert one.sessions(2) == 0 and not one.up(2)
