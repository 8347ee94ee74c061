"""Calls in threads: values, errors, and calls that hang."""

import asyncio
import threading

import pytest
from relax_server.log_ids import add_ids, current_ids
from relax_server.rollout.threads import CallThreads
from rollout_bench import until

from relax_sdk import EpisodeTimeout


@pytest.fixture
def released():
    """An event that hanging calls wait for; it is set when the test ends, so that no thread outlives it."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
async def threads():
    made = CallThreads("test", 2)
    yield made
    made.close()


async def test_a_call_returns_what_the_function_returns_in_another_thread(threads):
    name = await threads.call(lambda x: (x + 1, threading.current_thread() is threading.main_thread()), 1, limit=10)
    assert name == (2, False)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
async def test_a_call_raises_what_the_function_raises(threads, error):
    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        await threads.call(fail, limit=10)
    assert caught.value is error


async def test_lines_that_a_call_logs_carry_the_ids_of_who_asked(threads):
    async def ask(id: str) -> str:
        add_ids(trajectory=id)
        return await threads.call(lambda: current_ids()["trajectory"], limit=10)

    assert await asyncio.gather(*(ask(str(i)) for i in range(20))) == [str(i) for i in range(20)]
    assert "trajectory" not in current_ids()


async def test_a_stop_iteration_which_a_future_cannot_hold_arrives_as_an_error(threads):
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.call(lambda: next(iter(())), limit=10)


async def test_a_hanging_call_is_given_up_and_its_thread_replaced(threads, released):
    hanging = [threads.submit(released.wait, limit=0.05) for _ in range(6)]
    for job in hanging:
        with pytest.raises(EpisodeTimeout, match=r"longer than 0\.05 s"):
            await job.future
    assert (threads.abandoned, threads.stuck) == (6, 6)
    assert await asyncio.gather(*(threads.call(str, i, limit=10) for i in range(20))) == [str(i) for i in range(20)]
    released.set()
    await until(lambda: threads.stuck == 0)


async def test_waiting_for_a_thread_counts_against_no_limit(threads, released):
    """Two threads are busy for longer than the limit of the call that waits behind them."""
    busy = [threads.submit(released.wait, limit=60) for _ in range(2)]
    waiting = threads.submit(str, 1, limit=0.05)
    loop = asyncio.get_running_loop()
    loop.call_later(0.3, released.set)
    assert await waiting.future == "1"
    assert waiting.queued > waiting.limit
    assert all([await job.future for job in busy])
    assert threads.abandoned == 0


async def test_a_cancelled_call_that_has_not_begun_never_runs(threads, released):
    busy = [threads.submit(released.wait, limit=60) for _ in range(2)]
    ran = []
    job = threads.submit(ran.append, 1, limit=60)
    assert threads.give_up(job)
    released.set()
    await asyncio.gather(*(job.future for job in busy))
    await threads.call(str, limit=10)
    assert ran == [] and threads.stuck == 0


async def test_a_call_that_was_given_up_is_cleaned_up_after_in_its_own_thread(threads, released):
    cleaned = threading.Event()
    job = threads.submit(released.wait, limit=0.02, orphaned=cleaned.set)
    with pytest.raises(EpisodeTimeout):
        await job.future
    assert not cleaned.is_set()
    released.set()
    await until(cleaned.is_set)


async def test_a_call_that_ends_in_time_is_not_cleaned_up_after(threads):
    cleaned = threading.Event()
    await threads.submit(str, limit=10, orphaned=cleaned.set).future
    await threads.call(str, limit=10)
    assert not cleaned.is_set()


async def test_no_more_calls_run_at_once_than_there_are_threads():
    threads = CallThreads("test", 3)
    lock, running, most = threading.Lock(), 0, 0

    def work():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.01)
        with lock:
            running -= 1

    await asyncio.gather(*(threads.call(work, limit=10) for _ in range(30)))
    threads.close()
    assert 1 <= most <= 3
