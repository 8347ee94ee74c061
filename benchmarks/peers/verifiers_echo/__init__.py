"""The echo environment for verifiers: a taskset, and a harness that plays in verifiers' own process.

`Harness.launch` may run its loop in-process as long as every model call goes through the endpoint that it is given, which is
verifiers' interception server; so traces and scoring are verifiers' own, and no process is started for a rollout. What its
runtimes do by default, a process for each, takes 1.4 s of processor time an episode and is not measured here.
"""

import time

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.runtimes import ProgramResult

ENDS: list[tuple[float, float]] = []
"""Seconds, by the clock and of processor time, when each episode was scored."""
LIMIT = 180.0


class EchoTask(vf.Task[vf.TaskData]):
    """A question."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        ENDS.append((time.perf_counter(), time.process_time()))
        return float(trace.last_reply == "A")


class EchoTasksetConfig(vf.TasksetConfig):
    """How many."""

    episodes: int = 64


class EchoTaskset(vf.Taskset[EchoTask, EchoTasksetConfig]):
    """Questions."""

    def load(self) -> list[EchoTask]:
        n = self.config.episodes
        return [EchoTask(vf.TaskData(idx=i, prompt=f"question {i}: which letter?"), self.config.task) for i in range(n)]


class EchoHarnessConfig(HarnessConfig):
    """How long an episode is."""

    turns: int = 1


class EchoHarness(Harness[EchoHarnessConfig]):
    """Asks the model and plays the environment."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False
    _http: aiohttp.ClientSession | None = None

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        if EchoHarness._http is None:
            timeout = aiohttp.ClientTimeout(LIMIT)
            EchoHarness._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        _, prompt = self.resolve_prompt(data)
        messages = [{"role": "user", "content": prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        url = endpoint.rstrip("/") + "/chat/completions"
        for turn in range(1, self.config.turns + 1):
            body = {"model": ctx.model, "messages": messages}
            async with EchoHarness._http.post(url, json=body, headers=headers) as answer:
                if answer.status != 200:
                    return ProgramResult(1, "", (await answer.text())[:500])
                message = (await answer.json())["choices"][0]["message"]
            messages += [{"role": "assistant", "content": message["content"]}]
            messages += [{"role": "user", "content": f"wrong, try again ({turn})"}]
        return ProgramResult(0, "", "")


__all__ = ["EchoHarness", "EchoTaskset"]
