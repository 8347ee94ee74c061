"""Attacks on a rollout service, each for some seconds, in a process of its own; `benchmarks.hostile` runs them all.

    python -m benchmarks.attacks NAME --url URL --key KEY [--folder FOLDER] [--seconds 10]

Prints how requests were answered: HTTP statuses, close codes of WebSockets, or `cut` where the connection was ended. What an
attack's own environment answers is told apart (`env 502`), and so is what goes on under a key that was revoked (`still open`).
`revoked key` needs the folder of the service, where it makes the key and revokes it, as an operator would.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.envs import Eater

SLOW = 60.0
"""Seconds after which an answer has not come."""
BODY = b"POST /v1/media/image HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\nContent-Length: 100\r\n"
ENDS = 5.0
"""Seconds in which everything under a key that was revoked must have ended."""
SILENT = 2000
"""Connections that say nothing, or little."""


@dataclass
class Target:
    """The service that is attacked."""

    url: str
    key: str
    """Has the right to run; empty: none."""
    until: float
    """When the attack ends, by `time.monotonic`."""
    http: aiohttp.ClientSession
    folder: Path | None = None
    """The service's."""
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def going(self) -> bool:
        """Whether there is time left."""
        return time.monotonic() < self.until

    async def send(self, method: str, path: str, data: Any = None, kind: str = "application/json", **headers: str) -> bytes:
        """One request, counted; returns the answer's body, at most a mebibyte of it."""
        sent = {"Content-Type": kind} | ({"Authorization": f"Bearer {self.key}"} if self.key else {}) | headers
        try:
            async with asyncio.timeout(SLOW), self.http.request(method, self.url + path, data=data, headers=sent) as answer:
                self.seen[str(answer.status)] += 1
                return await answer.content.read(1 << 20)
        except TimeoutError:
            self.seen["no answer"] += 1
        except (aiohttp.ClientError, OSError):
            self.seen["cut"] += 1
        return b""

    async def json(self, method: str, path: str, body: Any) -> dict[str, Any]:
        """One request with a JSON body; the answer if it is an object."""
        raw = await self.send(method, path, body if isinstance(body, bytes) else orjson.dumps(body))
        with contextlib.suppress(orjson.JSONDecodeError):
            found = orjson.loads(raw)
            return found if isinstance(found, dict) else {}
        return {}

    async def session(self, **body: Any) -> str:
        """Opens a session; its path, empty if it was refused."""
        opened = await self.json("POST", "/v1/sessions", body)
        return f"/v1/sessions/{opened['id']}" if "id" in opened else ""


async def endless_bodies(target: Target) -> None:
    """Bodies of 600 MiB that do not say how long they are, to routes that take a kilobyte, without a key."""

    async def body() -> AsyncIterator[bytes]:
        piece = b" " * (1 << 20)
        for _ in range(600):
            if not target.going:
                return
            yield piece

    target.key = ""
    while target.going:
        await asyncio.gather(*(target.send("POST", f"/v1/{to}", body()) for to in ("sessions", "rollouts", "envs", "keys")))


async def large_json(target: Target) -> None:
    """Valid JSON of 60 MiB."""
    body = b"[" + b",".join([b'"' + b"a" * 1000 + b'"'] * 60_000) + b"]"
    while target.going:
        await target.json("POST", "/v1/sessions", b'{"metadata": {"x": ' + body + b"}}")


async def silent(target: Target) -> None:
    """Connections that never ask for anything, and others whose headers or bodies do not end."""
    host, port = target.url.removeprefix("http://").split(":")
    begins = (b"", b"GET / HTTP/1.1\r\nX-A: ", BODY)

    async def hold(begin: bytes) -> None:
        if begin is BODY:
            begin += f"Authorization: Bearer {target.key}\r\n\r\nhalf".encode()
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(begin)
            async with asyncio.timeout(max(0.0, target.until - time.monotonic())):
                raw = await reader.read()
            target.seen[raw.split()[1].decode() if raw else "cut"] += 1
            writer.close()
        except (OSError, TimeoutError):
            target.seen["held"] += 1

    async with asyncio.TaskGroup() as group:
        for n in range(SILENT):
            group.create_task(hold(begins[n % len(begins)]))
            if n % 100 == 99:
                await asyncio.sleep(0.05)


async def mute_sockets(target: Target) -> None:
    """WebSockets of sessions on which nothing is said."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(SILENT):
            if not target.going:
                break
            try:
                headers = {"Authorization": f"Bearer {target.key}"}
                await stack.enter_async_context(target.http.ws_connect(f"{target.url}/v1/sessions/ws", headers=headers))
                target.seen["101"] += 1
            except (aiohttp.ClientError, OSError) as error:
                target.seen[str(getattr(error, "status", "cut"))] += 1
        await asyncio.sleep(max(0.0, target.until - time.monotonic()))


async def guesses(target: Target) -> None:
    """Keys that nobody has."""

    async def guess(n: int) -> None:
        while target.going:
            target.key = f"rlx_{random.getrandbits(200):x}"
            await target.send("GET", "/v1/envs")

    await asyncio.gather(*map(guess, range(16)))


async def long_chats(target: Target) -> None:
    """Conversations of 10,000 to 100,000 messages, and texts of megabytes."""
    path = await target.session()
    long = [{"role": "user" if n % 2 == 0 else "assistant", "content": "a"} for n in range(100_001)]
    bodies = [{"messages": long[:10_001]}, {"messages": long}, {"messages": [{"role": "user", "content": "word " * (1 << 20)}]}]
    raw = [orjson.dumps({"model": "policy", "max_tokens": 1} | body) for body in bodies]
    while path and target.going:
        for body in raw:
            await target.json("POST", f"{path}/openai/v1/chat/completions", body)


async def deep_json(target: Target) -> None:
    """JSON of 100,000 levels, to every kind of route."""
    deep = b"[" * 100_000 + b"]" * 100_000
    path = await target.session()
    while target.going:
        await target.json("POST", "/v1/sessions", b'{"metadata": {"x": ' + deep + b"}}")
        await target.json("POST", f"{path}/openai/v1/chat/completions", b'{"messages": ' + deep + b"}")
        await target.json("POST", f"{path}/step", b'{"action": {"x": ' + deep + b"}}")
        await target.json("POST", "/v1/sessions", b'{"metadata": ' + b'{"x": ' * 900 + b"1" + b"}" * 901)


async def wrong_values(target: Target) -> None:
    """Lone surrogates, integers over 64 bits, NUL and huge names, wherever a value is stored."""
    bad = (b'"\\ud800"', b"123456789012345678901234567890", b'"\\u0000"', b'"' + b"a" * 1_000_000 + b'"', b"1e999", b"NaN")
    while target.going:
        for value in bad:
            for body in (b'{"metadata": {"x": %s}}', b'{"run": %s}', b'{"env": %s}', b'{"seed": %s}'):
                opened = await target.json("POST", "/v1/sessions", body % value)
                if "id" in opened:
                    path = f"/v1/sessions/{opened['id']}"
                    await target.json("POST", f"{path}/openai/v1/chat/completions", CHAT)
                    await target.json("POST", f"{path}/reward", b'{"name": %s, "value": 1.0}' % value)
                    await target.send("POST", f"{path}/finish")
            for name in (b"stop", b"stop_token_ids"):
                asked = b'{"env": "bench-1", "n": 1, "sampling": {"%s": [%s]}}' % (name, value)
                await target.json("POST", "/v1/rollouts", asked)
        await target.send("GET", "/v1/rollouts")


async def huge_rollouts(target: Target) -> None:
    """Rollouts of 262,144 episodes, cancelled at once."""
    while target.going:
        made = await target.json("POST", "/v1/rollouts", {"env": "bench-5", "n": 64, "group_size": 4096})
        await asyncio.sleep(1.0)
        if "id" in made:
            await target.send("DELETE", f"/v1/rollouts/{made['id']}")


async def openings(target: Target) -> None:
    """Sessions by the hundred, none of which is played."""
    while target.going:
        await asyncio.gather(*(target.session(env="bench-5") for _ in range(100)))


async def bad_media(target: Target) -> None:
    """Files that are no media, or grow when they are decoded."""
    files = list(_bad_files())

    async def post(kind: str, data: bytes) -> None:
        await target.send("POST", f"/v1/media/{kind}", data, "application/octet-stream")

    while target.going:
        await asyncio.gather(*(post(kind, data) for kind, data in files))


async def foreign_pages(target: Target) -> None:
    """What a web page could make its visitor's browser send."""
    target.key = ""
    from_page = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}
    while target.going:
        for path in ("/v1/pause", "/v1/media/image", "/v1/sessions", "/v1/keys"):
            await target.send("POST", path, b"{}", "text/plain", **from_page)
        for path in ("/v1/sessions/ws", "/v1/env-host"):
            try:
                async with target.http.ws_connect(target.url + path, headers=from_page):
                    target.seen["101"] += 1
            except (aiohttp.ClientError, OSError) as error:
                target.seen[str(getattr(error, "status", "cut"))] += 1


async def unread(target: Target) -> None:
    """Large answers, many over each connection, and event streams, none of which is read."""
    path = await target.session(metadata={"x": "a" * 1_000_000})
    await target.json("POST", f"{path}/openai/v1/chat/completions", CHAT)
    ended = await target.json("POST", f"{path}/finish", b"")
    asked = (f"/v1/trajectories/{ended.get('trajectory_id')}", f"{path}/events")
    host, port = target.url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()

    async def hold(n: int) -> None:
        request = f"GET {asked[n % 2]} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {target.key}\r\n\r\n".encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            try:
                await loop.sock_connect(client, (host, int(port)))
                await loop.sock_sendall(client, request * 16)
                await asyncio.sleep(max(0.0, target.until - time.monotonic()))
                client.send(request)
                target.seen["held"] += 1
            except OSError:
                target.seen["cut"] += 1

    await asyncio.gather(*map(hold, range(300)))


async def uploaded_code(target: Target) -> None:
    """Environments that take memory, begin processes and keep processors busy. They are refused (403, 503) where there is no
    sandbox, unless the service was started with `--trust-uploads`."""
    from relax_sdk.client.upload import uploadable
    from relax_sdk.registry import EnvSpec

    async def play(what: str) -> None:
        env = f"eater-{what}"
        if "id" not in await target.json("POST", "/v1/envs", uploadable(EnvSpec(env, Eater, [{"what": what}]), env)):
            return
        while target.going:
            path = await target.session(env=env, limits={"step_timeout": 2.0})
            if not path:
                await asyncio.sleep(0.2)
                continue
            await target.json("POST", f"{path}/openai/v1/chat/completions", CHAT)
            await target.json("POST", f"{path}/step", {"action": {"role": "assistant", "content": "go on"}})
            await target.send("DELETE", path)
        await target.send("DELETE", f"/v1/envs/{env}")

    await asyncio.gather(*map(play, ("memory", "processes", "processor")))
    for status in ("502", "504"):  # how an environment that fails, or takes too long, is told
        if count := target.seen.pop(status, 0):
            target.seen[f"env {status}"] = count


async def revoked_key(target: Target) -> None:
    """Sockets, event streams and sessions of a key that is revoked, which goes on asking."""
    from relax_server.api.keys import KeyRing
    from relax_server.journal.sql import SqlJournal

    assert target.folder is not None, "--folder is wanted"
    ring = KeyRing(SqlJournal(target.folder / "journal.db"))
    target.key, key = ring.create("to be revoked", episodes=64)
    open_ = set[asyncio.Task[None]]()
    paths = [await target.session() for _ in range(32)]
    headers = {"Authorization": f"Bearer {target.key}"}

    async def talk() -> None:
        async with target.http.ws_connect(f"{target.url}/v1/sessions/ws", headers=headers) as talk:
            async for _ in talk:
                pass

    async def follow(path: str) -> None:
        async with target.http.get(f"{target.url}{path}/events", headers=headers) as answer:
            await answer.content.read()

    open_ |= {asyncio.create_task(talk()) for _ in range(32)} | {asyncio.create_task(follow(path)) for path in paths}
    await asyncio.sleep(1.0)
    ring.revoke(key.id)
    _, pending = await asyncio.wait(open_, timeout=ENDS)
    target.seen["still open"] = len(pending)
    for task in pending:
        task.cancel()

    async def go_on(path: str) -> None:
        while target.going:
            await target.json("POST", f"{path}/openai/v1/chat/completions", CHAT)

    await asyncio.gather(*(go_on(path) for path in paths))


CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}


def _bad_files() -> list[tuple[str, bytes]]:
    """Kinds and bytes of files that a decoder should not be given, or only with limits."""
    sdp = b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=x\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\nm=video 40000 RTP/AVP 96\r\n"
    sdp += b"a=rtpmap:96 H264/90000\r\n"
    concat = b"ffconcat version 1.0\nfile '/etc/hostname'\n"
    playlist = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
    wave = b"RIFF" + struct.pack("<I", 0xFFFFFFF0) + b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 65535, 384_000, 0, 4, 16)
    others = [("video", data) for data in (sdp, concat, playlist)] + [
        ("audio", playlist),
        ("audio", wave + b"data\xff\xff\xff\x7f"),
    ]
    return [("image", _frames(20_000)), ("image", _frames(200)), ("image", _bomb()), *others]


def _frames(n: int) -> bytes:
    """A GIF with a large canvas and many frames of one pixel."""
    head = b"GIF89a" + struct.pack("<HHBBB", 4000, 4000, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    frame = b"!\xf9\x04\x04\x01\0\0\0," + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02L\x01\0"
    return head + frame * n + b";"


def _bomb() -> bytes:
    """A PNG of 20,000 × 20,000 pixels in some kilobytes."""
    import zlib

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    packed, pack = io.BytesIO(), zlib.compressobj(9)
    for _ in range(200):
        packed.write(pack.compress(bytes(250_100)))
    packed.write(pack.flush())
    head = struct.pack(">IIBBBBB", 20_000, 20_000, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed.getvalue()) + chunk(b"IEND", b"")


ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {
    "endless bodies": endless_bodies,
    "large JSON": large_json,
    "silent connections": silent,
    "mute sockets": mute_sockets,
    "guessed keys": guesses,
    "long chats": long_chats,
    "deep JSON": deep_json,
    "wrong values": wrong_values,
    "huge rollouts": huge_rollouts,
    "openings": openings,
    "bad media": bad_media,
    "foreign pages": foreign_pages,
    "unread answers": unread,
    "uploaded code": uploaded_code,
    "revoked key": revoked_key,
}


async def carry_out(name: str, url: str, key: str, seconds: float, folder: Path | None = None) -> Counter[str]:
    """One attack; returns how it was answered."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)) as http:
        target = Target(url, key, time.monotonic() + seconds, http, folder)
        await ATTACKS[name](target)
        return target.seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(ATTACKS))
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", default="")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(carry_out(args.name, args.url, args.key, args.seconds, args.folder))))


if __name__ == "__main__":
    main()
