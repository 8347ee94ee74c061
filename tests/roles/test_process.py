"""Processes of roles: messages by value, no orphans, deaths reported."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time

import psutil
from relax_server.engines.addresses import EngineAddress
from relax_server.roles.channel import Channel
from relax_server.roles.messages import Chat, Died, Failed, SetEngines
from relax_server.roles.process import RoleProcess


async def wait_for(inbox: asyncio.Queue, kind: type, seconds: float = 60.0):
    async with asyncio.timeout(seconds):
        while True:
            message = await inbox.get()
            if isinstance(message, kind):
                return message


def test_messages_round_trip():
    left, fd = Channel.pair()
    right = Channel(fd)
    left.send(SetEngines((EngineAddress("http://127.0.0.1:1", "embedded"),)))
    assert right.receive() == SetEngines((EngineAddress("http://127.0.0.1:1", "embedded"),))


def test_closing_one_end_is_seen_by_the_other():
    left, fd = Channel.pair()
    right = Channel(fd)
    closed = asyncio.Event()
    right.listen(lambda message: None, closed.set)
    left.close()
    deadline = time.monotonic() + 10
    while not closed.is_set() and time.monotonic() < deadline:
        os.sched_yield()
    assert closed.is_set()


async def test_a_role_that_fails_says_why_and_its_end_is_reported(tmp_path):
    inbox: asyncio.Queue = asyncio.Queue()
    process = RoleProcess("no-such-role", tmp_path, inbox.put_nowait)
    await process.start(Chat(1, (), None))
    failed = await wait_for(inbox, Failed)
    assert failed.fatal and "no-such-role" in failed.text
    assert (await wait_for(inbox, Died)).role == "no-such-role"
    assert "ConfigError" in await process.log_tail()
    await process.stop()


def test_a_class_from_a_script_travels_by_value_and_children_do_not_outlive_it(tmp_path):
    """The script defines its environment in `__main__`, without a main guard, and is killed with SIGKILL."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import asyncio, sys
            from pathlib import Path
            import relax_sdk as relax
            from relax_server.models.catalog import resolve_model
            from relax_server.roles.messages import RolloutReady, StartRollout
            from relax_server.roles.process import RoleProcess

            class MineEnv(relax.Env):
                def reset(self, *, seed=None, options=None):
                    return "hi", {}
                def step(self, action):
                    return None, 0.0, True, False, {}

            async def main():
                inbox = asyncio.Queue()
                process = RoleProcess("rollout", Path(sys.argv[1]), inbox.put_nowait)
                config = relax.RunConfig(env="mine")
                model = resolve_model("relax/tiny-omni")
                folder = Path(sys.argv[1])
                await process.start(StartRollout(relax.EnvSpec("mine", MineEnv), None, config, "r", folder, model, (), False))
                while not isinstance(await inbox.get(), RolloutReady):
                    pass
                print(process.pid, flush=True)
                await asyncio.sleep(600)

            asyncio.run(main())
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    line = parent.stdout.readline()
    assert line.strip(), (tmp_path / "logs" / "rollout.log").read_text()
    child = psutil.Process(int(line))
    parent.kill()
    parent.wait(10)
    assert not psutil.wait_procs([child], timeout=15)[1], "the role outlived its parent"
