"""A fake engine for load tests: it answers at once, without a model, and always the same.

    python -m benchmarks.fake_engine [--port 0] [--delay 0] [--model relax/tiny-omni]

It speaks SGLang's routes as far as the service uses them, and OpenAI's chat completions as vLLM answers them, with token ids
and logprobs, for systems that speak that; eight tokens either way. With a model's name, media are expanded to as many
placeholders as that model's processor makes of them; all items of a kind are taken to be as long as the first.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

TOKENS = [72, 101, 108, 108, 111, 33, 33, 33]
"""The answer; no special token of the tiny models is among them."""
PROMPT = list(range(20, 60))
"""Ids of an OpenAI prompt, whatever it was."""
MAX_BODY = 1 << 30


def answer(ids: list[int], n: int) -> dict[str, Any]:
    """One answer as SGLang writes it."""
    tokens = (TOKENS * (n // len(TOKENS) + 1))[:n]
    meta = {
        "id": "x",
        "finish_reason": {"type": "length", "length": n},
        "prompt_tokens": len(ids),
        "completion_tokens": n,
        "cached_tokens": 0,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": n}],
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        "output_token_logprobs_length": n,
    }
    return {"text": "", "output_ids": tokens, "prompt_token_ids": ids, "meta_info": meta}


def completion(model: str) -> dict[str, Any]:
    """One answer as vLLM writes it with `return_token_ids` and `logprobs`."""
    rows = [{"token": chr(token), "logprob": -1.0, "bytes": [token], "top_logprobs": []} for token in TOKENS]
    message = {"role": "assistant", "content": bytes(TOKENS).decode()}
    choice = {"index": 0, "message": message, "logprobs": {"content": rows}, "finish_reason": "stop", "token_ids": TOKENS}
    counts = {"prompt_tokens": len(PROMPT), "completion_tokens": len(TOKENS), "total_tokens": len(PROMPT) + len(TOKENS)}
    head = {"id": "x", "object": "chat.completion", "created": 0, "model": model, "prompt_token_ids": PROMPT}
    return head | {"choices": [choice], "usage": counts}


class Expander:
    """Prompts as a model would see them.

    Args:
        model: whose processor it is; empty: media are not expanded.
    """

    def __init__(self, model: str) -> None:
        self._processor: Any = None
        self._seen: dict[str, Any] = {}
        """Features by kind."""
        if model:
            from relax_server.models.catalog import resolve_model
            from relax_server.models.processor import Processor

            self._processor = Processor.load(resolve_model(model))

    def __call__(self, body: dict[str, Any]) -> list[int]:
        ids = body["input_ids"]
        items = {kind: iter(body.get(f"{kind}_data", ())) for kind in ("image", "audio", "video")}
        if self._processor is None or not any(f"{kind}_data" in body for kind in items):
            return ids
        kinds = {id: kind for kind, id in self._processor.placeholder_ids.items()}
        return self._processor.expand(ids, [self._features(kinds[id], items) for id in ids if id in kinds])

    def _features(self, kind: str, items: dict[str, Iterator[str]]) -> Any:
        url = next(items[kind])
        if kind not in self._seen:
            data = base64.b64decode(url.partition(",")[2]) if url.startswith("data:") else Path(url).read_bytes()
            self._seen[kind] = self._processor.features(data, kind, kind)
        return self._seen[kind]


def make_app(delay: float, model: str) -> web.Application:
    """The server.

    Args:
        delay: seconds before an answer.
        model: see `Expander`.
    """
    expanded, counts = Expander(model), {"calls": 0, "bytes": 0}

    async def read(request: web.Request) -> dict[str, Any]:
        raw = await request.read()
        counts["calls"] += 1
        counts["bytes"] += len(raw)
        if delay:
            await asyncio.sleep(delay)
        return orjson.loads(raw)

    async def generate(request: web.Request) -> web.Response:
        body = await read(request)
        sampling = body.get("sampling_params", {})
        one = answer(expanded(body), sampling.get("max_new_tokens", 8))
        whole = [one] * sampling["n"] if sampling.get("n", 1) > 1 else one
        return web.Response(body=orjson.dumps(whole), content_type="application/json")

    async def chat(request: web.Request) -> web.Response:
        body = await read(request)
        return web.Response(body=orjson.dumps(completion(body.get("model", ""))), content_type="application/json")

    async def fine(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "weight_version": "0", "model_path": "fake"})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})

    async def counted(request: web.Request) -> web.Response:
        return web.json_response(counts)

    app = web.Application(client_max_size=MAX_BODY)
    app.router.add_post("/generate", generate)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/counts", counted)
    for path in ("/health", "/model_info", "/server_info"):
        app.router.add_get(path, fine)
    return app


async def serve(port: int, delay: float, model: str) -> None:
    runner = web.AppRunner(make_app(delay, model), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=4096)
    await site.start()
    print(f"engine at {site.name}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--model", default="", help="whose placeholders media are expanded to")
    args = parser.parse_args()
    asyncio.run(serve(args.port, args.delay, args.model))


if __name__ == "__main__":
    main()
