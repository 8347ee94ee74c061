"""Engines that are added to a run and removed from it while it goes on: real runs, real engines."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web
from relax_server.engines.process import EngineProcess
from relax_server.journal import open_journal
from relax_server.models.catalog import resolve_model
from relax_server.roles.controller import Controller
from relax_server.roles.layout import RunLayout

import relax_sdk as relax
from relax_sdk.control import CONTROL, RunControl
from relax_sdk.runtime import Job

SMALL = dict(
    rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
    warmup={"steps": 0},
    eval={"every": 0},
    training={"checkpoint_every": 1000},
)


class Heard:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.steps: list[dict[str, Any]] = []

    def stage(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def step(self, metrics: dict[str, Any]) -> None:
        self.steps.append(metrics)


@dataclass
class Going:
    """A run that goes on."""

    folder: Path
    heard: Heard
    controller: Controller
    task: asyncio.Task[None]

    async def until(self, condition: Callable[[], Any], seconds: float = 90.0) -> Any:
        """Wait for something to become true while the run goes on."""
        async with asyncio.timeout(seconds):
            while not (found := condition()):
                if self.task.done():
                    await self.task
                assert not self.task.done(), "the run ended"
                await asyncio.sleep(0.05)
        return found

    async def steps(self, more: int) -> None:
        """Wait for so many further steps."""
        target = len(self.heard.steps) + more
        await self.until(lambda: len(self.heard.steps) >= target)

    async def ask(self, do: Callable[[RunControl], Any]) -> Any:
        """Use the run's control as another program does."""

        def call() -> Any:
            with RunControl(self.folder) as control:
                return do(control)

        return await asyncio.wait_for(asyncio.to_thread(call), 60)

    async def engine(self, id: str, *states: str, seconds: float = 90.0) -> dict[str, Any]:
        """Wait until an engine is in one of these states; `gone` is one."""
        async with asyncio.timeout(seconds):
            while True:
                rows = {row["id"]: row for row in await self.ask(RunControl.list)}
                row = rows.get(id, {"id": id, "state": "gone"})
                if row["state"] in states:
                    return row
                assert not self.task.done(), "the run ended"
                await asyncio.sleep(0.2)

    def turns(self) -> list[relax.Turn]:
        """All that are in the journal."""
        groups = open_journal(RunLayout(self.folder).journal).groups(self.folder.name, limit=100_000)
        return [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]


@contextlib.asynccontextmanager
async def going(folder: Path, **settings: Any) -> AsyncIterator[Going]:
    """A run from its first step on; at the end nothing of it was lost or trained on twice."""
    trainer = relax.Trainer("tone-v0", folder=folder, **(SMALL | settings))
    config = dataclasses.replace(trainer.config, steps=100_000)
    job = Job(trainer.spec, config, trainer._prepare(config, resume=False))
    heard = Heard()
    controller = Controller(job, heard)
    run = Going(job.folder, heard, controller, asyncio.create_task(controller.run()))
    try:
        await run.until(lambda: heard.steps, 150)
        yield run
        assert not run.task.done()
    finally:
        controller.request_stop()
        with pytest.raises(relax.RunError, match="stopped at step"):
            await asyncio.wait_for(run.task, 120)
    assert [row["step"] for row in heard.steps] == list(range(1, len(heard.steps) + 1))
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    assert counts.acked == len(heard.steps) * config.rollout.groups_per_step and counts.leased == 0
    assert not (run.folder / CONTROL).exists()
    mine = [" ".join(p.cmdline()) for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert not [command for command in mine if str(run.folder) in command or "roles.child" in command]


def pid(run: Going, id: str) -> int:
    """The process of an engine of the run's own."""
    process = run.controller.engines._slots[id].process
    assert isinstance(process, EngineProcess) and process.pid is not None
    return process.pid


async def test_an_engine_that_is_added_plays_with_the_current_weights_only(tmp_path):
    async with going(tmp_path / "run") as run:
        await run.steps(2)
        first = await run.ask(lambda control: control.add("second"))
        again = await run.ask(lambda control: control.add("second"))
        assert first["state"] == "starting" and again["id"] == "second" and len(await run.ask(RunControl.list)) == 2
        row = await run.engine("second", "current")
        joined, url = row["version"], row["url"]
        assert (await run.ask(lambda control: control.add("second")))["url"] == url, "and stays as it is"
        await run.until(lambda: any(e["url"] == url and e["answered"] >= 8 for e in run.controller.stats["engines"]))
        await run.steps(4)
        assert run.heard.steps[-1]["engines"] == 2
        assert max(row["staleness_max"] for row in run.heard.steps) <= 1
        versions = [span.version for turn in run.turns() if turn.engine == url for span in turn.weight_versions]
    # it joined with the version of the moment, which may be one behind what was shown a moment later
    assert versions and min(versions) >= joined - 1 and max(versions) > joined + 1
    assert not [warning for warning in run.heard.warnings if "failed" in warning]


async def test_removing_an_engine_loses_nothing_and_the_last_one_stays(tmp_path):
    async with going(tmp_path / "run", engines=2) as run:
        await run.steps(2)
        old, url = pid(run, "e1"), run.controller.engines._slots["e1"].url
        assert (await run.ask(lambda control: control.remove("e1", 30)))["state"] == "draining"
        await run.engine("e1", "gone")
        assert not psutil.pid_exists(old) or psutil.Process(old).status() == psutil.STATUS_ZOMBIE
        assert (await run.ask(lambda control: control.remove("e1")))["state"] == "gone"
        with pytest.raises(relax.ConfigError, match="engine e2 is the last one"):
            await run.ask(lambda control: control.remove("e2"))
        asked = len([turn for turn in run.turns() if turn.engine == url])
        await run.steps(3)
        assert len([turn for turn in run.turns() if turn.engine == url]) == asked, "nothing new after it was gone"
    assert run.heard.warnings == []


@pytest.mark.nightly
async def test_an_added_engine_that_is_killed_is_replaced(tmp_path):
    async with going(tmp_path / "run") as run:
        await run.ask(lambda control: control.add("second"))
        await run.engine("second", "current")
        killed = pid(run, "second")
        os.kill(killed, signal.SIGKILL)
        await run.until(lambda: pid(run, "second") != killed)
        row = await run.engine("second", "current")
        await run.until(lambda: any(e["url"] == row["url"] and e["answered"] for e in run.controller.stats["engines"]))
        await run.steps(2)
    assert any("starting a new one" in warning for warning in run.heard.warnings)


@pytest.mark.nightly
async def test_an_engine_that_cannot_be_had_leaves_the_run_as_it_is(tmp_path):
    async with going(tmp_path / "run") as run:
        good, run.controller.engines.model_path = run.controller.engines.model_path, tmp_path / "nothing"
        await run.ask(lambda control: control.add("broken"))
        await run.ask(lambda control: control.add("nobody", "http://127.0.0.1:9"))
        broken, nobody = await run.engine("broken", "lost"), await run.engine("nobody", "lost")
        assert "nothing" in broken["reason"] and "could not be added" in nobody["reason"]
        await run.steps(2)
        run.controller.engines.model_path = good
        await run.ask(lambda control: control.add("broken"))  # another try
        await run.engine("broken", "current")
        await run.ask(lambda control: control.remove("nobody"))
        await run.engine("nobody", "gone")
        await run.ask(lambda control: control.remove("broken"))  # at once, with work in flight
        await run.engine("broken", "gone")


async def test_an_engine_that_is_removed_while_it_starts_is_gone(tmp_path):
    async with going(tmp_path / "run") as run:
        await run.ask(lambda control: control.add("second"))
        await run.until(lambda: run.controller.engines._slots["second"].process.pid)
        started = pid(run, "second")
        assert (await run.ask(lambda control: control.remove("second")))["state"] == "draining"
        await run.engine("second", "gone")
        assert not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE
        fleet = run.controller.engines
        await run.until(lambda: not fleet._loading.locked())
        fleet.add("third")
        fleet.remove("third")
        assert run.controller.weights is not None
        await fleet.load(run.controller.weights, fleet.version)  # as a step does while it leaves
        await run.engine("third", "gone")
        await run.steps(1)


@pytest.mark.nightly
async def test_an_engine_that_runs_elsewhere_is_used_and_left_alone(tmp_path):
    process = EngineProcess(resolve_model("relax/tiny-omni"), tmp_path / "engine.log")
    await process.start()
    try:
        async with going(tmp_path / "run") as run:
            await run.ask(lambda control: control.add("mine", process.url))
            again = await run.ask(lambda control: control.add(url=process.url + "/"))
            assert again["id"] == "mine" and again["external"]
            with pytest.raises(relax.ConfigError, match="is there already, as mine"):
                await run.ask(lambda control: control.add("other", process.url))
            joined = (await run.engine("mine", "current"))["version"]
            await run.until(lambda: any(e["url"] == process.url and e["answered"] > 4 for e in run.controller.stats["engines"]))
            await run.steps(3)
            await run.ask(lambda control: control.remove("mine"))
            await run.engine("mine", "gone")
            await run.steps(1)
            turns = [turn for turn in run.turns() if turn.engine == process.url]
            versions = [span.version for turn in turns for span in turn.weight_versions]
            assert versions and min(versions) >= joined - 1 and max(versions) > joined
        assert process.alive()
    finally:
        await process.stop()


async def test_an_engine_is_added_where_engines_and_trainer_take_turns(tmp_path):
    async with going(tmp_path / "run", mode="colocate") as run:
        await run.ask(lambda control: control.add("second"))
        row = await run.engine("second", "current")
        await run.until(lambda: any(e["url"] == row["url"] and e["answered"] > 4 for e in run.controller.stats["engines"]))
        await run.steps(2)
        assert max(row["staleness_max"] for row in run.heard.steps) == 0
    assert run.heard.warnings == []


SLOW = 3.0
"""Seconds; a training step of these runs takes about half a second."""


class FaultyEngine:
    """A fake that takes weights, says that it is well, and answers calls wrongly, until it is `healed`.

    Then it passes them on to a real engine. One that "loads slowly" takes longer than a training step to load weights.
    """

    def __init__(self, fault: str) -> None:
        self.fault, self.healed, self.url, self.version = fault, "", "", "0"
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
        if self.healed:
            async with aiohttp.ClientSession() as session, session.post(self.healed + "/generate", data=body) as answer:
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
        fakes[0].healed = run.controller.engines._slots["e1"].url
        row = await run.engine("fake0", "current")
        await run.until(
            lambda: any(e["url"] == row["url"] and e["up"] and e["answered"] for e in run.controller.stats["engines"]), 60
        )
        await run.steps(2)


async def test_an_engine_that_loads_longer_than_a_step_takes_joins_all_the_same(tmp_path):
    async with faulty("loads slowly") as slow, going(tmp_path / "run") as run:
        slow.healed = run.controller.engines._slots["e1"].url
        before = len(run.heard.steps)
        await run.ask(lambda control: control.add("slow", slow.url))
        await run.engine("slow", "current")
        assert len(run.heard.steps) > before, "training waited for its first load"
        await run.steps(2)
    assert run.heard.warnings == []


async def test_a_trainer_that_is_ahead_of_slow_engines_has_only_its_newest_weights_loaded(tmp_path):
    async with faulty("loads slowly") as slow, going(tmp_path / "run", max_staleness=100) as run:
        slow.healed = run.controller.engines._slots["e1"].url
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
        slow.healed = run.controller.engines._slots["e1"].url
        await run.ask(lambda control: control.add("slow", slow.url))
        await run.engine("slow", "current")
        await run.steps(2)
        run.controller.policy.kill()  # no checkpoint yet: while one engine loads version 0, the other one answers with it
        await run.until(lambda: any("starting it again" in text for text in run.heard.warnings))
        run.heard.steps.clear()
        await run.steps(2)
        assert run.controller.stats["failures"] == {} and len(run.heard.warnings) == 1, run.heard.warnings


async def test_the_control_is_for_this_user_and_says_what_is_wrong(tmp_path):
    async with going(tmp_path / "run") as run, aiohttp.ClientSession() as session:
        path = run.folder / CONTROL
        control = json.loads(path.read_text())
        assert path.stat().st_mode & 0o777 == 0o600 and control["url"].startswith("http://127.0.0.1:")
        key = {"Authorization": f"Bearer {control['key']}"}

        async def ask(method: str, path: str, headers: Any = key, **how: Any) -> tuple[int, str]:
            async with session.request(method, control["url"] + path, headers=headers, **how) as response:
                answer = await response.json()
                return response.status, answer.get("error", {}).get("message", "")

        assert (await ask("GET", "/v1/engines", {}))[0] == 401
        assert (await ask("GET", "/v1/engines", {"Authorization": "Bearer ä"}))[0] == 401
        assert (await ask("DELETE", "/v1/engines/e1", {"Authorization": "Bearer x"}))[0] == 401
        for body, why in [
            (b"[", "not JSON"),
            (b"[]", "must be an object of id, kind, url"),
            (b'{"port": 1}', "must be an object of id, kind, url"),
            (b'{"id": 1}', "id = 1"),
            (b'{"id": "../x"}', "letters, digits"),
            (b'{"url": "ftp://127.0.0.1:1"}', "http://HOST:PORT"),
            (b'{"url": "http://127.0.0.1"}', "http://HOST:PORT"),
            (b'{"url": "http://me:pw@127.0.0.1:1"}', "http://HOST:PORT"),
            (b'{"url": "http://127.0.0.1:99999"}', "Port out of range"),
            (b'{"url": "http://example.org:80"}', "is not this machine"),
            (b'{"url": "http://127.0.0.1:1", "kind": "vacuum"}', "kind = 'vacuum'"),
            (b'{"kind": "embedded"}', "only together with a url"),
        ]:
            status, message = await ask("POST", "/v1/engines", data=body)
            assert (status, why in message) == (400, True), (body, status, message)
        assert await ask("DELETE", "/v1/engines/e1?drain_seconds=-1") == (400, "drain_seconds = '-1'; allowed: 0 to 3600")
        assert (await ask("DELETE", "/v1/engines/e1?drain_seconds=nan"))[0] == 400
        assert (await ask("DELETE", "/v1/engines/e1"))[0] == 409
        assert (await ask("GET", "/v1/engines/none"))[0] == 404 and (await ask("GET", "/v1/engines/e1"))[0] == 200
        assert (await ask("PUT", "/v1/engines"))[0] == 405 and (await ask("GET", "/v2"))[0] == 404


def test_the_control_of_a_run_that_is_gone_is_told_as_such(tmp_path):
    with pytest.raises(relax.RunError, match="no run is going on in"):
        RunControl(tmp_path)
    (tmp_path / CONTROL).write_text(json.dumps({"url": "http://127.0.0.1:9", "key": "k", "pid": 1, "host": "here"}))
    with RunControl(tmp_path) as control, pytest.raises(relax.RunError, match=r"process 1 on here.*relax train --resume"):
        control.list()
    (tmp_path / CONTROL).write_text("{")
    with pytest.raises(relax.RunError, match="damaged"):
        RunControl(tmp_path)


@pytest.mark.nightly
async def test_the_command_line_lists_adds_and_removes(tmp_path):
    from relax_server.engines.cli import app
    from typer.testing import CliRunner

    async def command(*words: str) -> Any:
        return await asyncio.wait_for(asyncio.to_thread(CliRunner().invoke, app, words), 120)

    async with going(tmp_path / "run") as run:
        folder = str(run.folder)
        added = await command("add", folder, "--id", "two")
        assert added.exit_code == 0 and "engine two is in use at http://127.0.0.1:" in added.output
        listed = await command("list", folder)
        assert listed.exit_code == 0 and "two" in listed.output and "e1" in listed.output
        refused = await command("add", folder, "--id", "three", "--url", "http://127.0.0.1:9")
        assert isinstance(refused.exception, relax.EngineError) and "engine three is lost" in str(refused.exception)
        removed = await command("remove", folder, "two", "--drain-seconds", "20")
        assert removed.exit_code == 0 and "engine two is gone" in removed.output
