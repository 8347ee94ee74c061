"""Media of strangers are decoded in processes that may die, of time, memory or a signal; what waits is shared out by key."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image as PILImage
from relax_server.api.keys import Key
from relax_server.api.media.decoders import MediaDecoders
from relax_server.api.media.limits import DecoderLimits
from relax_server.api.quotas import WORKER_SECONDS, KeyMeter, KeyRates
from relax_server.gateway.errors import ApiError
from relax_server.gateway.media import known_media
from relax_server.gateway.openai_chat import read_message
from relax_server.rollout.threads import CallThreads
from service_process import Service

import relax_sdk.media
from benchmarks.hostile_files import SDP, silence
from relax_sdk.errors import ConfigError, MediaError
from relax_sdk.media import Audio, Image, MediaRef, MediaStore
from relax_sdk.media_places import media_places

PICTURE = Image.from_array(np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)).bytes()
SOUND = Audio.from_array(np.zeros(1600, np.float32)).bytes()
SCANS = 3_000
"""Each goes over all of 4096 x 4096 pixels: minutes of work."""


def endless() -> bytes:
    """A progressive JPEG whose last scan is sent again and again."""
    buffer = io.BytesIO()
    PILImage.new("L", (4096, 4096), 128).save(buffer, format="JPEG", progressive=True, quality=10)
    data = buffer.getvalue()
    last, end = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:end] + data[last:end] * SCANS + data[end:]


ENDLESS = endless()


@asynccontextmanager
async def decoders(**limits: Any) -> AsyncIterator[MediaDecoders]:
    """Two processes at most, which are gone afterwards."""
    made = MediaDecoders(DecoderLimits(**{"processes": 2} | limits))
    try:
        yield made
    finally:
        made.close()
        await asyncio.to_thread(psutil.wait_procs, children(), timeout=20)
        assert not children()


def children(of: int | None = None) -> list[psutil.Process]:
    """The processes that decode for this process, or for another."""
    found = []
    for process in psutil.Process(of).children():
        try:
            if "relax_server.api.media.child" in process.cmdline():
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


async def at_work(made: MediaDecoders, owner: str) -> tuple[psutil.Process, asyncio.Task[MediaRef]]:
    """A process that is in the middle of an item without end."""
    await made.check("image", PICTURE, owner)
    (process,) = children()
    before, task = sum(process.cpu_times()[:2]), asyncio.create_task(made.check("image", ENDLESS, owner))
    async with asyncio.timeout(60):
        while sum(process.cpu_times()[:2]) < before + 0.2:  # noqa: ASYNC110  (a process tells nobody how busy it is)
            await asyncio.sleep(0.02)
    return process, task


async def test_items_are_taken_and_refused_and_one_process_does_it_all():
    async with decoders() as made:
        assert await made.check("image", PICTURE, "a") == Image.from_bytes(PICTURE).ref
        assert await made.check("audio", SOUND, "a") == Audio.from_bytes(SOUND).ref
        with pytest.raises(MediaError, match="not a readable video"):
            await made.check("video", SDP, "a")
        with pytest.raises(MediaError, match="damaged image"):
            await made.check("image", PICTURE[:2000], "a")
        (process,) = children()
        assert await made.check("image", PICTURE, "a") and children() == [process] and made.killed == 0


async def test_a_process_has_no_secrets_no_files_and_little_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RELAX_SECRET_OF_THE_SERVICE", "x")
    held = os.pipe()
    for fd in held:
        os.set_inheritable(fd, True)
    async with decoders(memory=64 << 20) as made:
        await made.check("image", PICTURE, "a")
        (process,) = children()
        assert "RELAX_SECRET_OF_THE_SERVICE" not in process.environ()
        theirs = {os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")}
        assert not theirs & {os.readlink(f"/proc/self/fd/{fd}") for fd in held}
        assert process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0) and process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
        with pytest.raises(MediaError, match=r"memory|allocate"):
            await made.check("audio", silence(20_000_000), "a")
        assert await made.check("image", PICTURE, "a")
    for fd in held:
        os.close(fd)


async def test_an_item_that_takes_too_long_is_refused_and_its_process_killed():
    async with decoders(seconds=1.0) as made:
        with pytest.raises(MediaError, match="the image took longer than 1 s to decode"):
            await made.check("image", ENDLESS, "a")
        assert not children() and made.killed == 1
        assert await made.check("image", PICTURE, "a"), "another process takes its place"


async def test_an_item_that_takes_too_much_of_the_processor_is_refused():
    async with decoders(cpu_seconds=1) as made:
        with pytest.raises(MediaError, match="the image took longer than 1 s of processor time to decode"):
            await made.check("image", ENDLESS, "a")


def meter_of(seconds: int) -> KeyMeter:
    """A meter of a key that has so many seconds; no time goes by."""
    return KeyMeter(KeyRates(WORKER_SECONDS, lambda: 0.0), Key("k", "k", frozenset(), 1, 1, worker_seconds_per_hour=seconds))


async def test_a_key_is_charged_for_the_time_of_a_processor_whatever_becomes_of_its_item():
    async with decoders(cpu_seconds=1) as made:
        meter = meter_of(2)
        for _ in range(3):
            await made.check("image", PICTURE, "a", meter)
        for _ in range(2):
            with pytest.raises(MediaError, match="processor time"):
                await made.check("image", ENDLESS, "a", meter)
        with pytest.raises(ApiError, match="has used its 2 worker seconds an hour") as refused:
            await made.check("image", PICTURE, "a", meter)
        assert refused.value.status == 429 and await made.check("image", PICTURE, "b", meter_of(1))


async def test_whoever_goes_away_is_charged_too():
    async with decoders() as made:
        meter = meter_of(1)
        before = asyncio.create_task(made.check("image", ENDLESS, "a", meter))
        async with asyncio.timeout(60):
            while not children() or sum(children()[0].cpu_times()[:2]) < 6:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
        before.cancel()
        await asyncio.wait({before})
        with pytest.raises(ApiError, match="has used its 1 worker seconds an hour"):
            await made.check("image", PICTURE, "a", meter)


async def test_a_decoder_that_crashes_costs_its_item_alone():
    async with decoders() as made:
        process, crashing = await at_work(made, "a")
        process.send_signal(signal.SIGSEGV)
        with pytest.raises(MediaError, match=r"the image made its decoder crash \(SIGSEGV\)"):
            await crashing
        assert await made.check("image", PICTURE, "a") and made.killed == 1


async def test_a_process_that_dies_while_it_has_nothing_to_do_costs_nothing():
    async with decoders() as made:
        await made.check("image", PICTURE, "a")
        (process,) = children()
        process.kill()
        process.wait(10)
        assert await made.check("image", PICTURE, "a")


async def test_who_goes_away_takes_the_process_along():
    async with decoders() as made:
        process, waiting = await at_work(made, "a")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        process.wait(10)
        assert await made.check("image", PICTURE, "a")


async def test_the_slow_items_of_one_key_leave_a_process_to_others():
    async with decoders(seconds=60.0, cpu_seconds=60) as made:
        _, first = await at_work(made, "slow")
        slow = [first, *(asyncio.create_task(made.check("image", ENDLESS, "slow")) for _ in range(3))]
        await asyncio.sleep(0)
        assert await made.check("image", PICTURE, "quick") and await made.check("audio", SOUND, "quick")
        assert not any(task.done() for task in slow) and len(children()) == 2
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)


async def test_a_key_may_have_only_so_many_bytes_waiting():
    async with decoders(waiting=1 << 20) as made:
        large = asyncio.create_task(made.check("image", bytes((1 << 20) - 10), "a"))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="media of this key wait") as refused:
            await made.check("image", PICTURE, "a")
        assert refused.value.status == 429 and refused.value.headers["Retry-After"]
        assert await made.check("image", PICTURE, "b")
        with pytest.raises(MediaError, match="not a readable image"):
            await large
        assert await made.check("image", PICTURE, "a"), "none waits any more"


@pytest.mark.parametrize("limits", [{"processes": 1}, {"seconds": 0}, {"memory": 1}, {"cpu_seconds": 0}, {"waiting": 0}])
def test_limits_out_of_range(limits: dict[str, Any]):
    with pytest.raises(ConfigError, match=f"DecoderLimits.{next(iter(limits))} = "):
        DecoderLimits(**limits)


# ------------------------------------------------------------------------------------------------------- on their way in


class Around:
    """Takes media and keeps what it was given."""

    def __init__(self) -> None:
        self.media_threads = CallThreads("test", 1)
        self.taken: list[tuple[str, bytes, str]] = []

    async def media_ref(self, sha256: str, kind: str | None = None) -> MediaRef | None:
        return None

    async def take_media(self, kind: str, data: bytes, owner: str) -> MediaRef:
        self.taken.append((kind, data, owner))
        if data == SDP:
            raise MediaError("not a readable video")
        return MediaRef(f"{len(self.taken):064x}", f"{kind}/x", len(data))


class Owned:
    owner = "its key"


def uri(data: bytes) -> str:
    import base64

    return "data:x/y;base64," + base64.b64encode(data).decode()


FORMS: dict[str, Callable[[bytes], dict[str, Any]]] = {
    "chat": lambda data: {"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri(data)}}]},
    "chat, a plain string": lambda data: {"role": "user", "content": [{"type": "image_url", "image_url": uri(data)}]},
    "a sound": lambda data: {
        "role": "user",
        "content": [{"type": "input_audio", "input_audio": {"data": uri(data).split(",")[1], "format": "wav"}}],
    },
}


@pytest.mark.parametrize("form", FORMS)
async def test_media_inside_messages_are_taken_in_before_the_messages_are_read(form: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relax_sdk.media, "probe", lambda *args: pytest.fail("decoded in the service's process"))
    around, message = Around(), FORMS[form](b"bytes")
    refs = await known_media(around, Owned(), [message])  # type: ignore[arg-type]
    kind = "audio" if form == "a sound" else "image"
    assert around.taken == [(kind, b"bytes", "its key")]
    assert [place.name for place in media_places([message])] == [f"{1:064x}"]
    (part,) = read_message(message, 0, refs).media
    assert part.ref is refs[kind, f"{1:064x}"]  # type: ignore[index]
    around.media_threads.close()


async def test_a_refused_item_names_its_message():
    around = Around()
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "video_url", "video_url": uri(SDP)}]}]
    with pytest.raises(ApiError, match=r"messages\[1\]: not a readable video"):
        await known_media(around, Owned(), messages)  # type: ignore[arg-type]
    around.media_threads.close()


@pytest.mark.parametrize("form", FORMS)
def test_media_that_were_not_taken_in_are_not_decoded_when_messages_are_read(form: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(relax_sdk.media, "probe", lambda *args: pytest.fail("decoded in the service's process"))
    with pytest.raises(ApiError, match="media cannot come inside this message"):
        read_message(FORMS[form](PICTURE), 0, {})


def test_a_service_takes_media_by_its_processes(service: Service):
    with service.client() as client:
        client.headers["Content-Type"] = "application/octet-stream"
        refused = client.post("/v1/media/video", content=SDP)
        assert refused.status_code == 400 and "MP4, WebM, AVI, GIF" in refused.json()["error"]["message"]
        buffer = io.BytesIO()
        PILImage.open(io.BytesIO(PICTURE)).save(buffer, format="ICO")
        refused = client.post("/v1/media/image", content=buffer.getvalue())
        assert refused.status_code == 400 and "PNG, JPEG" in refused.json()["error"]["message"]
        for format in ("BMP", "TIFF", "MPO"):
            buffer = io.BytesIO()
            PILImage.open(io.BytesIO(PICTURE)).save(buffer, format=format)
            taken = client.post("/v1/media/image", content=buffer.getvalue())
            assert taken.status_code == 201, taken.text
            served = client.get(f"/v1/media/{taken.json()['sha256']}")
            assert served.status_code == 200 and served.content == buffer.getvalue()
            assert served.headers["content-type"] == taken.json()["mime"]
        running = children(service.process.pid)
        assert running
        for process in running:
            process.kill()
        assert client.post("/v1/media/audio", content=SOUND).status_code == 201
        store = MediaStore(service.folder / "media")
        assert store.find(Audio.from_bytes(SOUND).ref.sha256) is not None
