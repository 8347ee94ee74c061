"""Code of strangers in a worker: `python tests/sandbox_attacks.py FOLDER PLAN` uploads it and tells what each attack came to.

The plan is JSON: `attacks`, statements by name whose value `out` is told; `limits` of the worker; `trusted`, to do without the
sandbox; `others`, the number of innocent workers beside it.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from relax_server.api.environments.limits import WorkerLimits
from relax_server.api.environments.sandbox import Sandbox
from relax_server.api.environments.source import EnvSource, python_version
from relax_server.api.environments.worker import WorkerLink
from relax_server.rollout.threads import CallThreads

import relax_sdk as relax
from relax_sdk.client.upload import uploadable
from relax_sdk.env import ResetResult, StepResult
from relax_sdk.hosting.protocol import Act, Reset
from relax_sdk.media import MediaStore


class Attacker(relax.Env):
    """Carries out what an action says, and answers with what came of it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        return "ready", {}

    def step(self, action: relax.AssistantMessage) -> StepResult:
        scope: dict[str, Any] = {}
        try:
            exec(action.text, scope)  # what else would an attacker do?
            told = str(scope.get("out"))
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        return told, 0.0, False, False, {}


class Worker:
    """A worker that plays one episode of `Attacker`."""

    def __init__(self, folder: Path, name: str, limits: WorkerLimits, sandbox: Sandbox, threads: CallThreads) -> None:
        source = EnvSource(id=name, kind="upload", payload=PAYLOAD, python=python_version())
        log = folder / "logs" / f"env-{name}.log"
        self.link = WorkerLink(source, limits, log, MediaStore(folder / "media"), threads.call, sandbox)

    async def open(self) -> None:
        await self.link.describe()
        await self.link.ask(functools.partial(Reset, episode="e", split="train", task_index=0, seed=1))

    async def do(self, code: str) -> str:
        action = {"role": "assistant", "content": code}
        try:
            async with asyncio.timeout(60.0):
                answer = await self.link.ask(functools.partial(Act, episode="e", action=action, tools=False))
        except relax.EnvError as error:
            return f"ended: {error}"
        except TimeoutError:
            return "hung"
        return answer["messages"][0]["content"]


async def carry_out(folder: Path, plan: dict[str, Any]) -> dict[str, str]:
    """What each attack was answered with; one that ends its worker is followed by a new worker."""
    sandbox, threads = Sandbox(folder, plan.get("trusted", False)), CallThreads("test", 4)
    limits = WorkerLimits(**plan.get("limits", {}))
    others = [Worker(folder, f"other{n}", limits, sandbox, threads) for n in range(plan.get("others", 0))]
    worker = Worker(folder, "attacker", limits, sandbox, threads)
    try:
        for one in (*others, worker):
            await one.open()
        for one in others:
            await one.do("open('/tmp/mine', 'w').write('a secret of another worker')")
        told = {}
        for name, code in plan["attacks"].items():
            told[name] = await worker.do(code)
            if told[name].startswith("ended: "):
                await worker.open()
        return told
    finally:
        for one in (*others, worker):
            await one.link.close()
        threads.close()


PAYLOAD = base64.b64decode(uploadable(relax.EnvSpec("attacker", Attacker), None)["upload"])

if __name__ == "__main__":
    os.umask(0o077)
    print(json.dumps(asyncio.run(carry_out(Path(sys.argv[1]), json.loads(sys.argv[2])))))
