"""`ScriptedServer`: a fake engine behind SGLang's HTTP routes, for a real `relax serve`. It answers by script."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterable
from typing import Any

import orjson
from aiohttp import web
from relax_server.models.processor import Processor

LIMIT = 30.0
"""Seconds for its start."""


class ScriptedServer:
    """Answers with the lines it was given last, one after another; `prompts` are the texts that it was asked with.

    It takes text only.

    Args:
        processor: of the model that the service believes it to serve.
    """

    def __init__(self, processor: Processor) -> None:
        self.processor = processor
        self.prompts: list[str] = []
        self.url = ""
        self._lines = iter(())
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scripted engine", daemon=True)

    def says(self, *lines: str) -> None:
        """What it answers from now on; asked once more than there are lines, it fails."""
        self.prompts, self._lines = [], iter(lines)

    def repeats(self, line: str) -> None:
        """What it answers from now on, every time."""
        self.prompts, self._lines = [], itertools.repeat(line)

    def start(self) -> None:
        """Listen on a port of this machine."""
        self._thread.start()
        assert self._ready.wait(LIMIT), "the scripted engine did not start"

    def stop(self) -> None:
        """Listen no more."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._ready.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        for path in ("/health", "/model_info", "/server_info"):
            app.router.add_get(path, self._fine)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _fine(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "weight_version": "0", "model_path": "scripted"})

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.prompts.append(self.processor.decode(body["input_ids"]))
        line = next(self._lines, None)
        if line is None:
            return web.json_response({"error": {"message": "the script is over"}}, status=400)
        answer = self._answer(body["input_ids"], self._cut(line, body["sampling_params"].get("stop", ())))
        return web.Response(body=orjson.dumps(answer), content_type="application/json")

    def _cut(self, line: str, stops: Iterable[str]) -> str:
        """The line up to the first stop text, which is generated still."""
        return line[: min([line.find(stop) + len(stop) for stop in stops if stop in line], default=len(line))]

    def _answer(self, prompt: list[int], line: str) -> dict[str, Any]:
        ids = [*self.processor.tokenizer.encode(line, add_special_tokens=False), self.processor.eos_ids[-1]]
        meta = {
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "weight_versions": [{"version": "0", "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-1.0, id, None] for id in ids],
        }
        return {"text": "", "output_ids": ids, "prompt_token_ids": prompt, "meta_info": meta}
