"""A fake engine for load tests: SGLang's routes as far as the service uses them, and eight tokens at once without a model.

python -m benchmarks.fake_engine [--port 0] [--delay 0]
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import orjson
from aiohttp import web

TOKENS = [72, 101, 108, 108, 111, 33, 33, 33]
"""The answer; no special token of the tiny models is among them."""


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


def make_app(delay: float) -> web.Application:
    """The server.

    Args:
        delay: seconds before an answer.
    """

    async def generate(request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        if delay:
            await asyncio.sleep(delay)
        sampling = body.get("sampling_params", {})
        one = answer(body["input_ids"], sampling.get("max_new_tokens", 8))
        whole = [one] * sampling["n"] if sampling.get("n", 1) > 1 else one
        return web.Response(body=orjson.dumps(whole), content_type="application/json")

    async def fine(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "weight_version": "0", "model_path": "fake"})

    app = web.Application()
    app.router.add_post("/generate", generate)
    for path in ("/health", "/model_info", "/server_info"):
        app.router.add_get(path, fine)
    return app


async def serve(port: int, delay: float) -> None:
    runner = web.AppRunner(make_app(delay), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    print(f"engine at {site.name}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay", type=float, default=0.0)
    args = parser.parse_args()
    asyncio.run(serve(args.port, args.delay))


if __name__ == "__main__":
    main()
