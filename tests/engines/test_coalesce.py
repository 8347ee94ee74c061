"""Equal requests become one; whoever gives up does not disturb the others."""

import asyncio
import dataclasses

import pytest
from relax_server.engines.base import GenerateRequest
from relax_server.engines.coalesce import MOST_TOKENS, CoalescingEngine
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from rollout_bench import until
from scripted_engine import ScriptedEngine

from relax_sdk import SamplingParams
from relax_sdk.errors import EngineAborted, EngineUnavailable

SHORT = SamplingParams(max_new_tokens=4)


class NumberedEngine(ScriptedEngine):
    """Gives each of the n answers a token of its own."""

    async def generate(self, request, timeout):
        (answer,) = await super().generate(request, timeout)
        return [dataclasses.replace(answer, response_ids=[i], logprobs=[-1.0]) for i in range(request.n)]


@pytest.fixture(scope="module")
def processor() -> Processor:
    return Processor.load(resolve_model("relax/tiny-qwen3"))


@pytest.fixture
def engine(processor):
    return NumberedEngine(processor)


@pytest.fixture
def coalescing(engine):
    return CoalescingEngine(engine)


def request(rid: str = "", ids: tuple[int, ...] = (5, 6), sampling: SamplingParams = SHORT) -> GenerateRequest:
    return GenerateRequest(list(ids), sampling, rid=rid)


async def ask(coalescing, *requests):
    answers = await asyncio.gather(*(coalescing.generate(r, 10.0) for r in requests))
    return [answer.response_ids for (answer,) in answers]


async def test_equal_requests_become_one_and_everyone_gets_an_answer_of_his_own(coalescing, engine):
    answers = await ask(coalescing, *(request(str(i)) for i in range(8)))
    assert sorted(answers) == [[i] for i in range(8)]
    assert [(r.n, r.rid) for r in engine.requests] == [(8, "0+7")]


async def test_different_requests_stay_apart(coalescing, engine):
    hot = SamplingParams(max_new_tokens=4, temperature=0.5)
    await ask(coalescing, request("a"), request("b", ids=(7,)), request("c", sampling=hot))
    assert sorted((r.rid, r.n) for r in engine.requests) == [("a", 1), ("b", 1), ("c", 1)]


@pytest.mark.parametrize("sampling", [SamplingParams(max_new_tokens=MOST_TOKENS + 1), SamplingParams(sampling_seed=3)])
async def test_long_requests_and_seeded_ones_for_an_engine_that_takes_one_seed_go_alone(engine, sampling):
    engine.deals_seeds = False
    coalescing = CoalescingEngine(engine)
    await ask(coalescing, request("a", sampling=sampling), request("b", sampling=sampling))
    assert [r.n for r in engine.requests] == [1, 1]


async def test_each_answer_of_equal_requests_has_the_seed_of_its_own_request(coalescing, engine):
    seeded = [request(str(i), sampling=SamplingParams(max_new_tokens=4, sampling_seed=70 + i)) for i in range(3)]
    gone = asyncio.create_task(coalescing.generate(seeded[1], 10.0))
    answers = asyncio.create_task(ask(coalescing, seeded[0], request("plain"), seeded[2]))
    await asyncio.sleep(0)
    gone.cancel()
    assert await answers == [[0], [0], [1]]
    assert sorted((r.n, r.seeds) for r in engine.requests) == [(1, ()), (2, (70, 72))]


async def test_a_request_that_is_the_only_one_of_its_kind_does_not_wait(coalescing, engine):
    alone = [dataclasses.replace(request(rid), alone=True) for rid in "ab"]
    await ask(coalescing, *alone)
    assert [(r.rid, r.n) for r in engine.requests] == [("a", 1), ("b", 1)]


async def test_a_later_equal_request_is_one_of_its_own(coalescing, engine):
    await ask(coalescing, request("a"))
    await ask(coalescing, request("b"))
    assert [r.rid for r in engine.requests] == ["a", "b"]


async def test_one_that_gives_up_does_not_disturb_the_others(coalescing, engine):
    engine.hold.clear()
    tasks = [asyncio.create_task(coalescing.generate(request(str(i)), 10.0)) for i in range(3)]
    await until(lambda: engine.running)
    tasks[1].cancel()
    await asyncio.sleep(0)
    assert not engine.aborted
    engine.hold.set()
    assert len(await tasks[0]) == 1 and len(await tasks[2]) == 1


async def test_when_all_give_up_the_request_is_aborted(coalescing, engine):
    engine.hold.clear()
    tasks = [asyncio.create_task(coalescing.generate(request(str(i)), 10.0)) for i in range(3)]
    await until(lambda: engine.running)
    for task in tasks:
        task.cancel()
    await until(lambda: engine.aborted)
    assert engine.aborted == ["0+2"] and not engine.running


async def test_those_that_gave_up_before_it_was_sent_are_not_asked_for(coalescing, engine):
    tasks = [asyncio.create_task(coalescing.generate(request(str(i)), 10.0)) for i in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(*tasks[1:])
    assert [r.n for r in engine.requests] == [2]


async def test_abort_ends_one_caller_s_answer_only(coalescing, engine):
    engine.hold.clear()
    tasks = [asyncio.create_task(coalescing.generate(request(str(i)), 10.0)) for i in range(2)]
    await until(lambda: engine.running)
    await coalescing.abort("1")
    with pytest.raises(EngineAborted):
        await tasks[1]
    engine.hold.set()
    assert len(await tasks[0]) == 1


async def test_a_failure_reaches_every_caller(coalescing, engine):
    engine.up = False
    results = await asyncio.gather(*(coalescing.generate(request(str(i)), 10.0) for i in range(3)), return_exceptions=True)
    assert [type(r) for r in results] == [EngineUnavailable] * 3
