"""Engine processes: starting, failing to start, ending with their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import psutil
import pytest
from relax_server.engines.embedded.__main__ import _listen
from relax_server.engines.http import HttpEngine
from relax_server.engines.process import EngineProcess
from relax_server.engines.settings import EngineSettings
from relax_server.guard import TOKEN, new_token

from relax_sdk.errors import EngineError, EngineUnavailable


async def test_start_answer_die_start_again_stop(tmp_path):
    process = EngineProcess("relax/tiny-llama", tmp_path / "log", EngineSettings(weight_version=5))
    with pytest.raises(EngineError, match="not started"):
        _ = process.url
    assert not process.alive()
    await process.start()
    assert process.alive() and process.pid is not None
    engine = HttpEngine(process.url, token=process.token)
    assert await engine.health()
    assert (await engine.model_info())["weight_version"] == "5"
    with pytest.raises(EngineError, match="running already"):
        await process.start()
    os.kill(process.pid, signal.SIGKILL)
    assert await asyncio.wait_for(process.wait(), 10) == -signal.SIGKILL
    assert not process.alive() and not await engine.health()
    await process.start()
    again = HttpEngine(process.url, token=process.token)
    assert await again.health()
    await process.stop()
    assert not process.alive() and process.returncode == 0
    assert not await again.health()
    await engine.close()
    await again.close()


async def test_a_taken_port_and_an_unknown_model_are_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = EngineProcess("relax/tiny-llama", tmp_path / "port.log", EngineSettings(port=port))
        with pytest.raises(EngineUnavailable, match=rf"(?s)exit code 3.*port {port}"):
            await process.start()
    with pytest.raises(EngineUnavailable, match=r"(?s)exit code 2.*no-such-model"):
        await EngineProcess("no-such-model", tmp_path / "model.log").start()


async def test_a_start_that_takes_too_long_leaves_nothing_behind(tmp_path):
    process = EngineProcess("relax/tiny-llama", tmp_path / "log")
    with pytest.raises(EngineUnavailable, match="not ready within"):
        await process.start(timeout=0.05)
    assert not process.alive() and process.pid is not None
    assert not psutil.pid_exists(process.pid)


async def test_the_engine_ends_when_its_parent_is_killed(tmp_path):
    script = f"""
import asyncio
from relax_server.engines.process import EngineProcess
async def main():
    process = EngineProcess("relax/tiny-llama", {str(tmp_path / "log")!r})
    await process.start()
    print(process.pid, process.url, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid, url = (await asyncio.wait_for(parent.stdout.readline(), 120)).decode().split()
    engine = psutil.Process(int(pid))
    client = HttpEngine(url)
    assert await client.health()
    parent.kill()
    await parent.wait()
    await asyncio.to_thread(engine.wait, 15)
    assert not await client.health()
    await client.close()


def test_an_engine_whose_parent_is_killed_while_it_starts_ends(tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(600)\n")
    parent = subprocess.Popen(["sleep", "600"])
    command = [sys.executable, "-m", "relax_server.engines.embedded", "--model-path", "relax/tiny-llama"]
    command += ["--parent-pid", str(parent.pid)]
    slow = os.environ | {"PYTHONPATH": str(tmp_path), TOKEN: new_token()}
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, env=slow, text=True)
    try:
        assert engine.stdout is not None and engine.stdout.readline() == "importing\n"
        parent.kill()
        parent.wait()
        assert engine.wait(15) == 0
    finally:
        parent.kill()
        engine.kill()
    late = subprocess.run(command, capture_output=True, env=slow, text=True, timeout=60)
    assert late.returncode == 0 and not late.stdout


def test_what_is_sent_is_not_held_back() -> None:
    """Only where the protocol is named does asyncio set TCP_NODELAY; without it tokens come in bursts of 40 ms."""
    listener = _listen("127.0.0.1", 0)
    assert listener.proto == socket.IPPROTO_TCP
    listener.close()
