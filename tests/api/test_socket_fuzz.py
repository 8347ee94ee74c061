"""Whatever is said on the service's WebSockets is answered or refused in time, and never breaks the service."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import orjson
import websockets
from service_process import Service

CASES, EACH = 2000, 50
"""Messages in all, and of one connection."""
WAIT = 30.0
OPS = ("open", "generate", "step", "reward", "finish", "cancel", "close", "", None, 7)
TEXTS = ("", "hello", "\x00", "a" * 5000, "none", "tone-v0", "../../etc/passwd", "\u202e", "relax-media:" + "0" * 64)
NUMBERS = (0, -1, 1, 1 << 31, 1 << 63, 1 << 64, 1.5, -0.0, 1e308)
FIELDS = {
    "open": ("env", "split", "task_index", "seed", "run", "mode", "sampling", "limits", "media", "metadata"),
    "generate": ("messages", "model", "max_tokens", "temperature", "stop", "tools", "stream", "logprobs"),
    "step": ("action",),
    "reward": ("name", "value"),
}
GOOD: dict[str, dict[str, Any]] = {
    "open": {"env": "tone-v0", "sampling": {"max_new_tokens": 1}},
    "generate": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    "step": {"action": {"role": "assistant", "content": "A"}},
    "reward": {"name": "mine", "value": 0.5},
}


def value(chance: random.Random, depth: int = 0) -> Any:
    """Anything that JSON can hold."""
    kind = chance.randrange(7 if depth < 4 else 5)
    match kind:
        case 0:
            return chance.choice(TEXTS)
        case 1:
            return chance.choice(NUMBERS[:-4] if chance.random() < 0.5 else (0, 1, 2.5))
        case 2:
            return chance.choice((True, False, None))
        case 3 | 4:
            return chance.choice(("user", "assistant", "train", "eval", [], {}))
        case 5:
            return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
        case _:
            return {chance.choice(("role", "content", "type", "text", "x")): value(chance, depth + 1) for _ in range(3)}


def message(chance: random.Random, id: int) -> bytes | str:
    """One message: nearly right, wrong, or no JSON at all."""
    draw = chance.random()
    if draw < 0.05:
        return chance.randbytes(chance.randrange(200))
    if draw < 0.1:
        return chance.choice(("", "[]", "null", "{", '"text"', "[" * 3000, '{"id": 1}', '{"op": "\\ud800"}'))
    op = chance.choice(OPS[:6] if draw < 0.9 else OPS)
    body = dict(GOOD.get(op, {})) if isinstance(op, str) else {}
    for name in FIELDS.get(op, ()) if isinstance(op, str) else ():
        if chance.random() < 0.3:
            body[name] = value(chance)
    return orjson.dumps({"id": id, "op": op} | body)


async def converse(url: str, seed: int, errors: list[str], seen: Counter[str]) -> None:
    """One connection; what it is answered is checked."""
    chance = random.Random(seed)
    async with websockets.connect(f"{url}/v1/sessions/ws", max_size=None) as talk:
        for n in range(EACH):
            said = message(chance, n)
            await talk.send(said)
            try:
                async with asyncio.timeout(WAIT):
                    answer = orjson.loads(await talk.recv())
            except TimeoutError:
                errors.append(f"no answer to {said[:300]!r}")
                return
            error = answer.get("error")
            seen[error["code"] if error is not None else "result"] += 1
            if error is not None and (error["type"] == "server_error" or not error["message"] or not error["code"]):
                errors.append(f"{error} to {said[:300]!r}")


async def test_two_thousand_messages(service: Service) -> None:
    url, errors, seen = service.url.replace("http", "ws"), list[str](), Counter[str]()
    for first in range(0, CASES // EACH, 8):
        await asyncio.gather(*(converse(url, seed, errors, seen) for seed in range(first, first + 8)))
    assert not errors, f"{len(errors)}, such as {errors[:5]}"
    assert seen.total() == CASES and seen["result"] > CASES // 20 and len(seen) > 8, seen
    async with httpx.AsyncClient(base_url=service.url, timeout=WAIT) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert (await client.get("/v1/sessions")).status_code == 200


async def test_what_no_host_and_no_relay_would_say(service: Service) -> None:
    url, chance = service.url.replace("http", "ws"), random.Random(1)
    for path in ("/v1/env-host", "/v1/relay"):
        for _ in range(50):
            try:
                async with asyncio.timeout(WAIT), websockets.connect(url + path) as talk:
                    said = message(chance, 0)
                    await talk.send(
                        said if chance.random() < 0.5 else bytes(said if isinstance(said, bytes) else said.encode())
                    )
                    async for _ in talk:
                        pass
            except (websockets.ConnectionClosed, websockets.InvalidStatus) as error:
                closed = getattr(error, "rcvd", None)
                assert closed is None or closed.code != 1011, f"it failed: {closed}"
    async with httpx.AsyncClient(base_url=service.url, timeout=WAIT) as client:
        assert (await client.get("/healthz")).status_code == 200
