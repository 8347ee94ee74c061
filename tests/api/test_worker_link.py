"""A worker of an uploaded environment that ends while the service has more to ask."""

from __future__ import annotations

import asyncio
import base64
import functools
from pathlib import Path

import pytest
from hosted_envs import Hostile
from relax_server.api.environments import worker
from relax_server.api.environments.limits import WorkerLimits
from relax_server.api.environments.sandbox import Sandbox
from relax_server.api.environments.source import EnvSource, python_version
from relax_server.rollout.threads import CallThreads
from rollout_bench import until

import relax_sdk as relax
from relax_sdk.client.upload import uploadable
from relax_sdk.hosting.protocol import Act, Reset
from relax_sdk.media import MediaStore


async def test_what_is_asked_while_the_end_of_a_worker_is_told_is_for_the_next_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, tail = asyncio.Event(), worker.log_tail

    async def slow_tail(path: Path, lines: int) -> str:
        await told.wait()
        return await tail(path, lines)

    monkeypatch.setattr(worker, "log_tail", slow_tail)
    payload = base64.b64decode(uploadable(relax.EnvSpec("hostile", Hostile), None)["upload"])
    source = EnvSource(id="hostile", kind="upload", payload=payload, python=python_version())
    threads = CallThreads("test", 2)
    link = worker.WorkerLink(
        source, WorkerLimits(), tmp_path / "env.log", MediaStore(tmp_path / "media"), threads.call, Sandbox(tmp_path, True)
    )
    begin = functools.partial(Reset, split="train", task_index=0, seed=1)
    try:
        await link.ask(functools.partial(begin, episode="first"))
        action = {"role": "assistant", "content": "exit"}
        last = asyncio.create_task(link.ask(functools.partial(Act, episode="first", action=action, tools=False)))
        await until(lambda: link.ended == 1)
        following = asyncio.create_task(link.ask(functools.partial(begin, episode="second")))
        await until(lambda: link.waiting == 2)
        told.set()
        with pytest.raises(relax.EnvError):
            await last
        await asyncio.wait_for(following, 60)
    finally:
        await link.close()
        threads.close()
