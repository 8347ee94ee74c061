"""The engine pool: preference, load, loss of an engine, and engines that come and go."""

import asyncio

import pytest
from relax_server.engines.base import GenerateRequest
from relax_server.rollout.pool import MAX_FAULTS, EnginePool
from rollout_bench import until
from scripted_engine import ScriptedEngine

from relax_sdk import EngineError, EngineFaulty, EpisodeTimeout, SamplingParams


@pytest.fixture
async def engines(processor):
    return [ScriptedEngine(processor, url=f"scripted://{name}") for name in "abc"]


@pytest.fixture
async def pool(engines, monkeypatch):
    monkeypatch.setattr("relax_server.rollout.pool.FIRST_PROBE", 0.001)
    made = EnginePool(engines)
    yield made
    await made.close()


def request(processor, rid="r"):
    return GenerateRequest(processor.tokenizer.encode("hi"), SamplingParams(), rid=rid)


async def ask(pool, processor, key, timeout=10.0, rid="r"):
    return (await pool.generate(request(processor, rid), timeout, key))[1]


async def test_a_key_stays_on_one_engine_and_keys_spread_evenly(pool, processor, engines):
    used = {key: {await ask(pool, processor, key) for _ in range(3)} for key in "123456"}
    assert all(len(urls) == 1 for urls in used.values())
    assert [len(e.requests) for e in engines] == [6, 6, 6]


async def test_a_released_key_makes_room(pool, processor, engines):
    for key in "abc":
        await ask(pool, processor, key)
    pool.release("b")
    assert await ask(pool, processor, "d") == engines[1].url


async def test_a_turn_survives_the_loss_of_its_engine(pool, processor, engines):
    first = await ask(pool, processor, "key")
    lost = next(e for e in engines if e.url == first)
    lost.up = False
    second = await ask(pool, processor, "key")
    assert second != first
    assert await ask(pool, processor, "key") == second, "and stays where it went"
    assert [m["up"] for m in pool.stats() if m["url"] == first] == [False]


async def test_an_engine_lost_in_the_middle_of_a_turn(pool, processor, engines):
    for engine in engines:
        engine.hold.clear()
    asking = asyncio.create_task(ask(pool, processor, "key"))
    await until(lambda: any(e.running for e in engines))
    lost = next(e for e in engines if e.running)
    lost.up = False
    for engine in engines:
        engine.hold.set()
    assert await asking != lost.url


async def test_an_engine_comes_back_when_it_answers(pool, processor, engines):
    for engine in engines:
        engine.up = False
    asking = asyncio.create_task(ask(pool, processor, "key"))
    await until(lambda: not any(m["up"] for m in pool.stats()))
    engines[2].up = True
    assert await asking == engines[2].url


async def test_an_engine_with_old_weights_does_not_come_back(pool, processor, engines):
    pool.version = 3
    for engine in engines[:2]:
        await pool.remove(engine.url)
    engines[2].up = False
    asking = asyncio.create_task(ask(pool, processor, "key"))
    await until(lambda: not any(m["up"] for m in pool.stats()))
    asked = asyncio.Event()
    original = engines[2].model_info

    async def model_info():
        asked.set()
        return await original()

    engines[2].model_info = model_info
    engines[2].up = True
    await asked.wait()
    assert not asking.done() and not pool.stats()[0]["up"]
    engines[2].version = 3
    assert await asking == engines[2].url


async def test_without_an_engine_a_turn_waits_for_one_and_then_times_out(pool, processor, engines):
    for engine in engines:
        await pool.remove(engine.url)
    asking = asyncio.create_task(ask(pool, processor, "key"))
    await asyncio.sleep(0)
    pool.add(engines[1])
    assert await asking == engines[1].url
    await pool.remove(engines[1].url)
    with pytest.raises(EpisodeTimeout, match=r"did not answer within 0\.05 s \(last: no engine is up\)"):
        await ask(pool, processor, "key", timeout=0.05)


async def test_a_time_out_names_the_engine_that_is_still_generating_and_aborts_it(pool, processor, engines):
    for engine in engines:
        engine.hold.clear()
    with pytest.raises(EpisodeTimeout, match="scripted://a is still generating"):
        await ask(pool, processor, "key", timeout=0.05, rid="slow")
    await until(lambda: engines[0].aborted == ["slow"])


async def test_a_refusal_is_not_tried_elsewhere(pool, processor, engines):
    for engine in engines:
        engine.script = lambda request: EngineError("too long")
    with pytest.raises(EngineError, match="too long"):
        await ask(pool, processor, "key")
    assert sum(len(e.requests) for e in engines) == 1


async def test_removing_waits_for_calls_in_flight_and_gives_nothing_new(pool, processor, engines):
    engines[0].hold.clear()
    asking = asyncio.create_task(ask(pool, processor, "first"))
    await until(lambda: bool(engines[0].running))
    removing = asyncio.create_task(pool.remove(engines[0].url, drain=10))
    await asyncio.sleep(0)
    others = {await ask(pool, processor, f"key {i}") for i in range(6)}
    assert engines[0].url not in others and not removing.done()
    engines[0].hold.set()
    assert await asking == engines[0].url
    assert await removing is True
    assert [m["url"] for m in pool.stats()] == [e.url for e in engines[1:]]


async def test_removing_without_patience_leaves_the_call_undisturbed(pool, processor, engines):
    engines[0].hold.clear()
    asking = asyncio.create_task(ask(pool, processor, "first"))
    await until(lambda: bool(engines[0].running))
    assert await pool.remove(engines[0].url) is False
    engines[0].hold.set()
    assert await asking == engines[0].url


async def test_removing_and_adding_are_idempotent(pool, processor, engines):
    assert await pool.remove("scripted://unknown") is True
    url = await ask(pool, processor, "key")
    for engine in engines:
        pool.add(engine)
    assert len(pool.engines) == 3
    assert [m["answered"] for m in pool.stats() if m["url"] == url] == [1]
    assert await ask(pool, processor, "key") == url


def fails(request):
    raise EngineFaulty("cannot be right")


def state(pool, engine):
    return next(row for row in pool.stats() if row["url"] == engine.url)


async def test_an_engine_that_answers_wrongly_is_left_out_and_tried_again_later(pool, processor, engines):
    for engine in engines[1:]:
        await pool.remove(engine.url)
    wrong = ScriptedEngine(processor, fails, "scripted://wrong")
    pool.add(wrong)
    pool._members[wrong.url].pause = 0.05
    for i in range(4 * MAX_FAULTS):  # keys are dealt out evenly, so it is asked until it is out
        assert await ask(pool, processor, f"key {i}") == engines[0].url
    assert state(pool, wrong)["failed"] == MAX_FAULTS and state(pool, wrong)["error"] == "cannot be right"
    assert not state(pool, wrong)["up"]
    wrong.script = lambda request: "A"
    await until(lambda: state(pool, wrong)["up"])
    assert wrong.url in {await ask(pool, processor, f"later {i}") for i in range(40)}


async def test_a_wrong_answer_is_asked_for_once_more_elsewhere(pool, processor, engines):
    for engine in engines:
        engine.script = fails
    with pytest.raises(EngineFaulty, match="cannot be right"):
        await ask(pool, processor, "key")
    assert sorted(len(engine.requests) for engine in engines) == [0, 1, 1]


async def test_the_last_engine_stays_whatever_it_answers(pool, processor, engines):
    for engine in engines[1:]:
        await pool.remove(engine.url)
    engines[0].script = fails
    for i in range(2 * MAX_FAULTS):
        with pytest.raises(EngineFaulty):
            await ask(pool, processor, f"key {i}")
    assert state(pool, engines[0])["up"] and state(pool, engines[0])["failed"] == 2 * MAX_FAULTS
    engines[0].script = lambda request: "A"
    assert await ask(pool, processor, "key") == engines[0].url


async def test_one_answer_for_many_callers_counts_once(pool, processor, engines):
    fault = EngineFaulty("shared")

    def shared(request):
        raise fault

    engines[0].script = shared
    for i in range(10):
        assert await ask(pool, processor, f"key {i}") != engines[0].url
    assert state(pool, engines[0])["failed"] == 1 and state(pool, engines[0])["up"]


async def test_an_engine_that_hangs_is_left_out(pool, processor, engines):
    await pool.remove(engines[2].url)
    engines[0].hold.clear()
    late = 0
    for i in range(4 * MAX_FAULTS):
        try:
            await ask(pool, processor, f"key {i}", timeout=0.05, rid=f"r{i}")
        except EpisodeTimeout:
            late += 1
    assert late == MAX_FAULTS and not state(pool, engines[0])["up"]
    assert "did not answer within 0.05 s" in state(pool, engines[0])["error"]


@pytest.mark.parametrize(("version", "right"), [(2, False), (3, True), (4, True), (400, False)])
async def test_answers_from_other_weights_are_not_taken(pool, processor, engines, version, right):
    pool.version = 3
    for engine in engines:
        engine.version = 3
    engines[0].version = version
    used = {await ask(pool, processor, f"key {i}") for i in range(6)}
    assert (engines[0].url in used) == right
    assert (state(pool, engines[0])["error"] is None) == right


async def test_going_back_to_a_checkpoint_makes_no_engine_look_wrong(pool, processor, engines):
    pool.version = 9
    for engine in engines:
        engine.version = 9
        engine.hold.clear()
    asking = [asyncio.create_task(ask(pool, processor, f"key {i}", rid=f"r{i}")) for i in range(6)]
    await until(lambda: sum(len(engine.running) for engine in engines) == 6)
    pool.version = 7
    for engine in engines:
        engine.version = 7
        engine.hold.set()
    await asyncio.gather(*asking)
    assert all(row["up"] and row["error"] is None for row in pool.stats())


@pytest.mark.parametrize(("loading", "wrong"), [(3, 2), (60, 90)])
async def test_while_weights_are_loaded_an_engine_may_have_the_old_or_the_new_ones(pool, processor, engines, loading, wrong):
    pool.version, pool.loading = 20, loading
    for engine, version in zip(engines, (20, loading, wrong), strict=True):
        engine.version = version
    used = {await ask(pool, processor, f"key {i}") for i in range(6)}
    assert used == {engine.url for engine in engines[:2]}
    assert [row["error"] is None for row in pool.stats()] == [True, True, False]


async def test_calls_that_an_engine_does_not_finish_in_time_begin_again_elsewhere(pool, processor, engines):
    engines[0].hold.clear()
    asking = asyncio.create_task(ask(pool, processor, "first"))
    await until(lambda: bool(engines[0].running))
    assert await pool.remove(engines[0].url, drain=0.05, move=True) is False
    assert await asking in (engines[1].url, engines[2].url)
    await until(lambda: engines[0].aborted == ["r"])
