"""Engines that answer wrongly or load slowly, in runs that go on: fakes beside a real engine."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from elastic_run import SMALL, going
from relax_server.engines.addresses import EngineAddress
from relax_server.engines.process import EngineProcess
from relax_server.models.catalog import resolve_model

from benchmarks.tcp_line import line_to

SLOW = 3.0
"""Seconds; a training step of these runs takes about half a second."""


class FaultyEngine:
    """A fake that takes weights, says that it is well, and answers calls wrongly, until it is `healed`.

    Then it passes them on to a real engine. One that "loads slowly" takes longer than a training step to load weights.
    """

    def __init__(self, fault: str) -> None:
        self.fault, self.url, self.version = fault, "", "0"
        self.healed: EngineAddress | None = None
        self.loads = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/update_weights_from_disk":
            if self.fault == "loads slowly":
                await asyncio.sleep(SLOW)
            self.loads += 1
            self.version = json.loads(body)["weight_version"]
            return web.json_response({"success": True})
        if request.path != "/generate":
            return web.json_response({"weight_version": self.version})
        if self.healed is not None:
            key = {"Authorization": f"Bearer {self.healed.token}", "Content-Type": "application/json"}
            url = self.healed.url + "/generate"
            async with aiohttp.ClientSession(headers=key) as session, session.post(url, data=body) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type="application/json")
        if self.fault == "hangs":
            await asyncio.Event().wait()
        if self.fault == "fails":
            return web.json_response({"error": {"message": "no memory left"}}, status=500)
        n, ids = json.loads(body)["sampling_params"]["n"], json.loads(body)["input_ids"]
        version = "999" if self.fault == "has other weights" else self.version
        rows = [[-1.0, 7, None]] * (0 if self.fault == "gives too few logprobs" else 1)
        meta = {"output_token_logprobs": rows, "finish_reason": {"type": "length"}, "weight_version": version}
        answer = {"output_ids": [7], "prompt_token_ids": ids, "meta_info": meta}
        return web.json_response([answer] * n if n > 1 else answer)


@contextlib.asynccontextmanager
async def faulty(fault: str) -> AsyncIterator[FaultyEngine]:
    """Such a fake, listening."""
    engine, app = FaultyEngine(fault), web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


FAULTS = {
    "fails": "answered 500: no memory left",
    "gives too few logprobs": "0 logprobs that do not belong to its 1 tokens",
    "has other weights": "weights of version 999",
    "hangs": "did not answer within 2 s",
}


@pytest.mark.nightly
async def test_engines_that_answer_wrongly_are_left_out_with_the_reason_and_tried_again(tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        fakes = [await stack.enter_async_context(faulty(fault)) for fault in FAULTS]
        run = await stack.enter_async_context(going(tmp_path / "run", rollout=SMALL["rollout"] | {"turn_timeout": 2.0}))
        for number, fake in enumerate(fakes):
            await run.ask(lambda control, n=number, url=fake.url: control.add(f"fake{n}", url))
        for number, fake in enumerate(fakes):
            row = await run.engine(f"fake{number}", "out")
            assert FAULTS[fake.fault] in row["reason"], row
        await run.steps(2)
        fakes[0].healed = run.controller.engines._slots["e1"].reach
        row = await run.engine("fake0", "current")
        await run.until(
            lambda: any(e["url"] == row["url"] and e["up"] and e["answered"] for e in run.controller.progress.stats["engines"]),
            60,
        )
        await run.steps(2)


@pytest.mark.nightly
async def test_an_engine_that_loads_longer_than_a_step_takes_joins_all_the_same(tmp_path):
    async with faulty("loads slowly") as slow, going(tmp_path / "run") as run:
        slow.healed = run.controller.engines._slots["e1"].reach
        before = len(run.heard.steps)
        await run.ask(lambda control: control.add("slow", slow.url))
        await run.engine("slow", "current")
        assert len(run.heard.steps) > before, "training waited for its first load"
        await run.steps(2)
    assert run.heard.warnings == []


@pytest.mark.nightly
async def test_a_trainer_that_is_ahead_of_slow_engines_has_only_its_newest_weights_loaded(tmp_path):
    async with faulty("loads slowly") as slow, going(tmp_path / "run", max_staleness=100) as run:
        slow.healed = run.controller.engines._slots["e1"].reach
        await run.ask(lambda control: control.add("slow", slow.url))
        await run.engine("slow", "current")
        before = slow.loads
        await run.steps(20)
        assert 0 < slow.loads - before < 20
    assert run.heard.warnings == []
    assert {row["engines"] for row in run.heard.steps[-20:]} == {2}


@pytest.mark.nightly
async def test_engines_that_go_back_to_a_checkpoint_are_not_taken_for_faulty_ones(tmp_path):
    async with faulty("loads slowly") as slow, going(tmp_path / "run", max_staleness=1000) as run:
        slow.healed = run.controller.engines._slots["e1"].reach
        await run.ask(lambda control: control.add("slow", slow.url))
        await run.engine("slow", "current")
        await run.steps(2)
        run.controller.policy.kill()  # no checkpoint yet: while one engine loads version 0, the other one answers with it
        await run.until(lambda: any("starting it again" in text for text in run.heard.warnings))
        run.heard.steps.clear()
        await run.steps(2)
        assert run.controller.progress.stats["failures"] == {} and len(run.heard.warnings) == 1, run.heard.warnings


@pytest.mark.parametrize("how", ["reset", pytest.param("silent", marks=pytest.mark.nightly)])
async def test_a_cut_between_a_run_and_its_only_engine_loses_nothing(tmp_path, how):
    process = EngineProcess(resolve_model("relax/tiny-omni"), tmp_path / "engine.log")
    await process.start()
    try:
        async with line_to(process.url) as line, going(tmp_path / "run") as run:
            await run.ask(lambda control: control.add("far", line.url, token=process.token))
            await run.engine("far", "current")
            await run.ask(lambda control: control.remove("e1"))
            await run.engine("e1", "gone")
            await run.steps(2)
            line.cut(how)
            await run.until(lambda: line.held or any("far" in warning for warning in run.heard.warnings))
            line.mend()
            await run.steps(4)
        assert process.alive()
    finally:
        await process.stop()
