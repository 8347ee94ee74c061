"""Engines that are added to a run and removed from it while it goes on: real runs, real engines."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from elastic_run import Going, going
from relax_server.engines.process import EngineProcess
from relax_server.models.catalog import resolve_model

import relax_sdk as relax
from relax_sdk.control import CONTROL, RunControl


def pid(run: Going, id: str) -> int:
    """The process of an engine of the run's own."""
    process = run.controller.engines._slots[id].process
    assert isinstance(process, EngineProcess) and process.pid is not None
    return process.pid


def versions(run: Going, url: str) -> list[int]:
    """The weight versions with which an engine has sampled what is in the journal."""
    return [span.version for turn in run.turns() if turn.engine == url for span in turn.weight_versions]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(tmp_path_factory) -> AsyncIterator[Going]:
    """A run with one engine of its own, which every test leaves as it found it."""
    async with going(tmp_path_factory.mktemp("shared") / "run") as run:
        yield run


async def test_an_engine_that_is_added_plays_with_the_current_weights_only(tmp_path):
    async with going(tmp_path / "run") as run:
        await run.steps(2)
        then = run.controller.engines.version
        first = await run.ask(lambda control: control.add("second"))
        again = await run.ask(lambda control: control.add("second"))
        assert first["state"] == "starting" and again["id"] == "second" and len(await run.ask(RunControl.list)) == 2
        row = await run.engine("second", "current")
        url = row["url"]
        assert (await run.ask(lambda control: control.add("second")))["url"] == url, "and stays as it is"
        await run.until(lambda: len(set(versions(run, url))) > 1)
        await run.steps(4)
        assert run.heard.steps[-1]["engines"] == 2
        assert max(row["staleness_max"] for row in run.heard.steps) <= 1
        played = versions(run, url)
    # the run went on while it started; it joined with what was current then, and was updated after
    assert then <= min(played) < max(played)
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
        await run.until(lambda: any(e["url"] == row["url"] and e["answered"] for e in run.controller.progress.stats["engines"]))
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


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_is_removed_while_it_starts_is_gone(shared):
    await shared.ask(lambda control: control.add("early"))
    await shared.until(lambda: shared.controller.engines._slots["early"].process.pid)
    started = pid(shared, "early")
    assert (await shared.ask(lambda control: control.remove("early")))["state"] == "draining"
    await shared.engine("early", "gone")
    assert not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE
    fleet = shared.controller.engines
    await shared.until(lambda: not fleet._weights._turn.locked())
    fleet.add("third")
    fleet.remove("third")
    assert shared.controller.sync.weights is not None
    await fleet.load(shared.controller.sync.weights, fleet.version)  # as a step does while it leaves
    await shared.engine("third", "gone")
    await shared.steps(1)


@pytest.mark.nightly
async def test_an_engine_that_runs_elsewhere_is_used_and_left_alone(tmp_path):
    process = EngineProcess(resolve_model("relax/tiny-omni"), tmp_path / "engine.log")
    await process.start()
    try:
        async with going(tmp_path / "run") as run:
            then = run.controller.engines.version
            await run.ask(lambda control: control.add("mine", process.url, token=process.token))
            again = await run.ask(lambda control: control.add(url=process.url + "/"))
            assert again["id"] == "mine" and again["external"]
            with pytest.raises(relax.ConfigError, match="is there already, as mine"):
                await run.ask(lambda control: control.add("other", process.url))
            joined = (await run.engine("mine", "current"))["version"]
            await run.until(lambda: max(versions(run, process.url), default=0) > joined)
            await run.ask(lambda control: control.remove("mine"))
            await run.engine("mine", "gone")
            await run.steps(1)
            assert min(versions(run, process.url)) >= then
        assert process.alive()
    finally:
        await process.stop()


@pytest.mark.nightly
async def test_an_engine_is_added_where_engines_and_trainer_take_turns(tmp_path):
    async with going(tmp_path / "run", mode="colocate") as run:
        await run.ask(lambda control: control.add("second"))
        row = await run.engine("second", "current")
        await run.until(
            lambda: any(e["url"] == row["url"] and e["answered"] > 4 for e in run.controller.progress.stats["engines"])
        )
        await run.steps(2)
        assert max(row["staleness_max"] for row in run.heard.steps) == 0
    assert run.heard.warnings == []


@pytest.mark.asyncio(loop_scope="module")
async def test_the_control_is_for_this_user_and_says_what_is_wrong(shared):
    async with aiohttp.ClientSession() as session:
        path = shared.folder / CONTROL
        control = json.loads(path.read_text())
        assert path.stat().st_mode & 0o777 == 0o600 and control["url"].startswith("http://127.0.0.1:")
        key = {"Authorization": f"Bearer {control['key']}", "Content-Type": "application/json"}

        async def ask(method: str, path: str, headers: Any = key, **how: Any) -> tuple[int, str]:
            async with session.request(method, control["url"] + path, headers=headers, **how) as response:
                answer = await response.json()
                return response.status, answer.get("error", {}).get("message", "")

        assert (await ask("GET", "/v1/engines", {}))[0] == 401
        assert (await ask("GET", "/v1/engines", {"Authorization": "Bearer ä"}))[0] == 401
        assert (await ask("DELETE", "/v1/engines/e1", {"Authorization": "Bearer x"}))[0] == 401
        for body, why in [
            (b"[", "not JSON"),
            (b"[]", "must be an object of id, kind, token, url, weights"),
            (b'{"port": 1}', "must be an object of id, kind, token, url"),
            (b'{"id": 1}', "id = 1"),
            (b'{"id": "../x"}', "letters, digits"),
            (b'{"token": "a b", "url": "http://127.0.0.1:1"}', "visible ASCII"),
            (b'{"token": "abcdefghijklmnopqrstuvwxyz"}', "only together with a url"),
            (b'{"url": "ftp://127.0.0.1:1"}', "http://HOST:PORT"),
            (b'{"url": "http://127.0.0.1"}', "http://HOST:PORT"),
            (b'{"url": "http://me:pw@127.0.0.1:1"}', "http://HOST:PORT"),
            (b'{"url": "http://127.0.0.1:99999"}', "Port out of range"),
            (b'{"url": "http://example.org:80"}', "is not this machine"),
            (b'{"url": "http://127.0.0.1:1", "kind": "vacuum"}', "kind = 'vacuum'"),
            (b'{"kind": "embedded"}', "only together with a url"),
            (b'{"weights": "folder"}', "only together with a url"),
            (b'{"url": "http://127.0.0.1:1", "weights": "post"}', "allowed: folder, broadcast"),
            (b'{"url": "http://127.0.0.1:1", "weights": "broadcast"}', "SGLang alone takes weights so"),
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
