"""Agents that are forked from a process with their libraries behave as if they had been started."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from relax_server.gateway.agent.processes import AgentProcesses, end, modules_of

TOP = "import numpy, httpx, os, sys, atexit, random\n"


@pytest.fixture
async def processes(tmp_path):
    """`processes(program, *arguments)`: a script that may be forked."""
    made = []

    def make(program: str, *arguments: str) -> AgentProcesses:
        script = tmp_path / "agent.py"
        script.write_text(TOP + textwrap.dedent(program))
        made.append(AgentProcesses([sys.executable, str(script), *arguments]))
        return made[-1]

    yield make
    for processes in made:
        await processes.close()


async def told(processes: AgentProcesses, **variables: str) -> tuple[int, str]:
    """Exit status and output of one process."""
    process = await processes.start(variables)
    output = await asyncio.wait_for(process.output.read(), 60)
    return await asyncio.wait_for(process.wait(), 60), output.decode()


async def test_arguments_environment_and_main(processes, tmp_path):
    (tmp_path / "beside.py").write_text("WORD = 'found'")
    forked = processes("import beside; print(__name__, sys.argv[1:], os.environ['WHO'], beside.WORD)", "--x", "1")
    assert await told(forked, WHO="a") == (0, "__main__ ['--x', '1'] a found\n")
    assert await told(forked, WHO="b") == (0, "__main__ ['--x', '1'] b found\n")


async def test_a_module(tmp_path, monkeypatch):
    (tmp_path / "their_agent.py").write_text(TOP + "print(__name__, sys.argv[1:], sys.modules['__main__'].__file__)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    processes = AgentProcesses([sys.executable, "-m", "their_agent", "x"])
    code, output = await told(processes)
    assert code == 0 and output.startswith("__main__ ['x']") and "their_agent.py" in output
    await processes.close()


@pytest.mark.parametrize(
    ("program", "code", "says"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no more')", 1, "no more"),
        ("raise KeyError('oh')", 1, "KeyError: 'oh'"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("atexit.register(print, 'goodbye')", 0, "goodbye"),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()", 0, "late"),
        ("print(sys.stdin.read() == '')", 0, "True"),
    ],
)
async def test_how_it_ends(processes, program, code, says):
    ended, output = await told(processes(program))
    assert ended == code and says in output


async def test_it_is_forked_and_its_libraries_are_there(processes):
    forked = processes("print(os.getppid(), time_of_import := 'httpx' in sys.modules)")
    parents = {(await told(forked))[1] for _ in range(3)}
    assert len(parents) == 1 and "True" in parents.pop()


async def test_random_numbers_differ(processes):
    forked = processes("print(random.random(), numpy.random.rand())")
    outputs = [(await told(forked))[1] for _ in range(3)]
    assert len({o.split()[0] for o in outputs}) == len({o.split()[1] for o in outputs}) == 3


async def test_many_at_once(processes):
    forked = processes("print(os.environ['N'])")
    answers = await asyncio.gather(*(told(forked, N=str(i)) for i in range(40)))
    assert answers == [(0, f"{i}\n") for i in range(40)]


async def test_a_process_is_ended_with_all_that_it_started(processes):
    program = "import subprocess, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"
    process = await processes(program).start({})
    child = int(await asyncio.wait_for(process.output.readline(), 60))
    await end(process)
    assert process.returncode == -signal.SIGTERM
    gone, _ = psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=10)
    assert not psutil.pid_exists(child) or gone


async def test_one_whose_caller_gave_up_is_ended(processes, tmp_path):
    program = f"import time; open({str(tmp_path)!r} + '/' + os.environ['NAME'], 'w').write(str(os.getpid())); time.sleep(600)"
    forked = processes(program)
    await end(await forked.start({"NAME": "before"}))
    asking = asyncio.create_task(forked.start({"NAME": "given up"}))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await end(await forked.start({"NAME": "after"}))  # answers come in order, so the one before was heard of
    pid = tmp_path / "given up"
    written = int(pid.read_text() or 0) if pid.exists() else 0
    gone, _ = psutil.wait_procs([psutil.Process(written)] if written and psutil.pid_exists(written) else [], timeout=10)
    assert not written or gone or not psutil.pid_exists(written)


async def test_one_that_ends_before_anybody_looks(processes, monkeypatch):
    forked = processes("os._exit(7)")
    connect = asyncio.get_running_loop().connect_read_pipe

    async def late(*arguments):
        await asyncio.sleep(0.5)  # by then its end has been told
        return await connect(*arguments)

    monkeypatch.setattr(asyncio.get_running_loop(), "connect_read_pipe", late)
    assert (await told(forked))[0] == 7


async def test_those_that_run_go_on_when_no_more_can_be_forked(processes, monkeypatch):
    forked = processes("import time; time.sleep(1.0); print('whole')")
    running = await forked.start({})
    monkeypatch.setattr(forked._forks, "start", lambda variables: asyncio.wait_for(asyncio.Event().wait(), 0.01))
    assert await told(forked) == (0, "whole\n")
    assert await asyncio.wait_for(running.output.read(), 60) == b"whole\n" and await running.wait() == 0


async def test_without_the_server_they_are_started_anew(processes):
    forked = processes("print(os.getppid())")
    code, output = await told(forked)
    assert code == 0 and int(output) != os.getpid()
    os.kill(int(output), signal.SIGKILL)
    for _ in range(2):
        code, output = await told(forked)
        assert code == 0 and int(output)


def test_what_is_imported_beforehand(tmp_path):
    script = tmp_path / "a.py"
    script.write_text("from openai import OpenAI\nimport os, json")
    python = sys.executable
    assert "openai" in modules_of([python, str(script)])
    assert "openai" in modules_of([python, "-m", "relax_agents.openai_loop"])
    script.write_text("import json\ndef main():\n    import openai")
    for command in ([python, str(script)], [python, "-c", "import openai"], [python, "-u", str(script)], ["sh", str(script)]):
        assert modules_of(command) == (), command
    script.write_text("import openai, (")
    assert modules_of([python, str(script)]) == () and modules_of([python, str(tmp_path / "none.py")]) == ()
    assert modules_of([str(Path("no-such-folder") / "python3"), str(script)]) == ()
