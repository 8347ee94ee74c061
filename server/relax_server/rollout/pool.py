"""`EnginePool`: engines by URL; a group stays on one engine, and a turn survives the loss of the engine it was on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from relax_sdk.errors import EngineFaulty, EngineUnavailable, EpisodeTimeout
from relax_server.engines.base import Engine, GenerateRequest, Generation

FIRST_PROBE, SLOWEST_PROBE = 0.1, 5.0
"""Seconds before an engine that failed is asked again; doubled each time up to the second."""
ABORT_TIMEOUT = 5.0

MAX_FAULTS = 3
"""Answers in a row that were wrong or did not come in time, before an engine is left out."""
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 300.0
"""Seconds before an engine that was left out for that is tried again; doubled each time up to the second."""
AHEAD = 4
"""Weights that an answer may be ahead of those told of: the news that they are being loaded may come late."""
LATE = 5.0
"""Seconds that an engine's own time limit is behind the call's, which so ends first and knows what happened."""


class Listener:
    """Hears of an answer as it grows, each time of all of it so far.

    Args:
        on_partial: called with it.
    """

    def __init__(self, on_partial: Callable[[Generation], None]) -> None:
        self._on_partial = on_partial
        self.heard = False
        """Whether there was anything yet."""

    def __call__(self, partial: Generation) -> None:
        self.heard = True
        self._on_partial(partial)


async def _streamed(engine: Engine, request: GenerateRequest, timeout: float, listener: Listener) -> Generation:
    """The last, whole state of a streamed answer."""
    answer: Generation | None = None
    async for answer in engine.stream(request, timeout):
        listener(answer)
    if answer is None:
        raise EngineUnavailable(f"{engine.url}: the stream ended before the answer began")
    return answer


@dataclass
class Member:
    """One engine of the pool."""

    engine: Engine
    up: bool = True
    draining: bool = False
    """The engine finishes what it has and gets nothing new."""
    running: int = 0
    """Calls in flight."""
    keys: set[str] = field(default_factory=set)
    """Groups that prefer it."""
    answered: int = 0
    failed: int = 0
    error: str | None = None
    """The last failure."""
    fault: EngineFaulty | None = None
    """The last wrong answer; calls that were put together into one request share it."""
    faults: int = 0
    """Wrong or late answers in a row."""
    pause: float = FIRST_PAUSE
    """Seconds, when it is left out for its faults the next time."""
    calls: set[asyncio.Timeout] = field(default_factory=set)
    """End a call here, so that it goes on elsewhere."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    probe: asyncio.Task[None] | None = None


class EnginePool:
    """Engines by URL; safe to change while episodes run. All methods belong to one event loop.

    Args:
        engines: that hold the current weights.
    """

    def __init__(self, engines: Iterable[Engine] = ()) -> None:
        self.updates_per_batch = 1
        """Weight versions from one batch to the next."""
        self.version: int | None = None
        """Weight version that all engines have, and that one must have to come back after a failure; None: any."""
        self.loading: int | None = None
        """The version that they are just loading."""
        self._members: dict[str, Member] = {}
        self._preferred: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        for engine in engines:
            self.add(engine)

    def add(self, engine: Engine) -> None:
        """Let an engine that holds the current weights join, or come back; adding it again changes nothing."""
        old = self._members.get(engine.url)
        if old is not None:
            if old.engine is engine and old.up and not old.draining:
                return
            self._prefer_none(old)
            if old.probe is not None:
                old.probe.cancel()
        self._members[engine.url] = Member(engine)
        self._wake()

    async def remove(self, url: str, drain: float = 0.0, move: bool = False) -> bool:
        """Give an engine nothing new, and forget it.

        Args:
            url: of the engine; removing an unknown one changes nothing.
            drain: seconds to wait for its calls in flight; those that are left then go on undisturbed.
            move: those that are left begin again on other engines.

        Returns:
            Whether it was idle when it left.
        """
        member = self._members.get(url)
        if member is None:
            return True
        member.draining = True
        if member.running and drain > 0:
            member.idle.clear()
            try:
                async with asyncio.timeout(drain):
                    await member.idle.wait()
            except TimeoutError:
                pass
        if self._members.get(url) is member:
            del self._members[url]
            self._prefer_none(member)
        if member.probe is not None:
            member.probe.cancel()
        idle = member.running == 0
        if move:
            for limit in [limit for limit in member.calls if not limit.expired()]:
                limit.reschedule(asyncio.get_running_loop().time())
        return idle

    @property
    def engines(self) -> list[Engine]:
        """All engines, those that are down included."""
        return [member.engine for member in self._members.values()]

    async def generate(
        self, request: GenerateRequest, timeout: float, key: str, listener: Listener | None = None
    ) -> tuple[Generation, str]:
        """One answer, from the engine that `key` prefers or else the least loaded.

        An engine that cannot be reached is left out until it answers again, and the call goes to another one; not so once
        `listener` has heard something, as that cannot be taken back. A wrong answer is asked for once more elsewhere, where
        there is another engine; an engine that gives `MAX_FAULTS` in a row, or does not answer in time as often, is left out
        and tried again after a while. The last one that is up stays, so that its error is seen.

        Args:
            request: ids and media; `n` is 1.
            timeout: seconds for everything, waiting for an engine included.
            key: calls of one key prefer one engine, for its prefix cache.
            listener: hears of the answer as it grows.

        Returns:
            The answer and the URL of the engine that gave it.

        Raises:
            EpisodeTimeout: no answer in time.
            EngineError: the engine refused the request.
            EngineFaulty: it answered wrongly, and so did another one if there is one.
            EngineAborted: the request was aborted from outside.
            EngineUnavailable: the engine was lost in the middle of an answer that `listener` has heard of.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        member: Member | None = None
        faulty: Member | None = None
        failure = "no engine is up"
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    member = None
                    member = await self._choose(key, faulty)
                    try:
                        left = max(deadline - asyncio.get_running_loop().time(), 0.0) + LATE
                        return await self._call(member, request, left, listener), member.engine.url
                    except EngineFaulty as error:
                        self._faulted(member, error)
                        if faulty is not None or not self._ready(member) or (listener is not None and listener.heard):
                            raise
                        faulty = member
                    except EngineUnavailable as error:
                        failure = f"{member.engine.url}: {error}"
                        self._down(member, str(error))
                        if listener is not None and listener.heard:
                            raise
        except TimeoutError as error:
            if isinstance(error, EpisodeTimeout):
                raise
            if member is not None:
                self._spawn(self._abort(member.engine, request.rid))
                self._faulted(member, EngineFaulty(f"{member.engine.url} did not answer within {timeout:g} s"))
            last = f"{member.engine.url} is still generating" if member is not None else failure
            raise EpisodeTimeout(f"the model did not answer within {timeout:g} s (last: {last})") from error
        except asyncio.CancelledError:
            if member is not None:
                self._spawn(self._abort(member.engine, request.rid))
            raise

    def release(self, key: str) -> None:
        """Forget which engine a key prefers; its group is over."""
        url = self._preferred.pop(key, None)
        if url is not None and url in self._members:
            self._members[url].keys.discard(key)

    def stats(self) -> list[dict[str, Any]]:
        """Each engine's state, for display."""
        return [
            dict(url=url, up=m.up, draining=m.draining, running=m.running, answered=m.answered, failed=m.failed, error=m.error)
            for url, m in self._members.items()
        ]

    async def close(self) -> None:
        """Stop probing; the engines themselves go on."""
        tasks = [*self._background, *(m.probe for m in self._members.values() if m.probe is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ----------------------------------------------------------------------------------------------------- choosing

    def _ready(self, besides: Member | None = None) -> list[Member]:
        return [m for m in self._members.values() if m.up and not m.draining and m is not besides]

    async def _choose(self, key: str, besides: Member | None = None) -> Member:
        while True:
            preferred = self._members.get(self._preferred.get(key, ""))
            if preferred is not None and preferred.up and not preferred.draining and preferred is not besides:
                return preferred
            ready = self._ready(besides) or self._ready()
            if ready:
                best = min(ready, key=lambda m: (len(m.keys), m.running))
                self.release(key)
                self._preferred[key] = best.engine.url
                best.keys.add(key)
                return best
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _prefer_none(self, member: Member) -> None:
        for key in member.keys:
            self._preferred.pop(key, None)
        member.keys.clear()

    # ------------------------------------------------------------------------------------------------------ calling

    async def _call(self, member: Member, request: GenerateRequest, timeout: float, listener: Listener | None) -> Generation:
        member.running += 1
        loaded = self.version
        moved = asyncio.timeout(None)
        try:
            async with moved:
                member.calls.add(moved)
                if listener is None:
                    answer = (await member.engine.generate(request, timeout))[0]
                else:
                    answer = await _streamed(member.engine, request, timeout, listener)
            self._check_version(member, answer, loaded)
            member.answered += 1
            member.faults, member.pause = 0, FIRST_PAUSE
            return answer
        except TimeoutError as error:
            if not moved.expired():
                raise
            self._spawn(self._abort(member.engine, request.rid))
            raise EngineUnavailable("it left the pool") from error
        finally:
            member.calls.discard(moved)
            member.running -= 1
            if member.running == 0:
                member.idle.set()

    def _check_version(self, member: Member, answer: Generation, loaded: int | None) -> None:
        """Refuse an answer from weights that this engine cannot hold, if it is well.

        Args:
            loaded: into all engines when the call began; the run may have gone back to a checkpoint since.
        """
        if loaded is None or self.version is None or not answer.weight_versions:
            return
        versions = [span.version for span in answer.weight_versions]
        told = [loaded, self.version] + ([] if self.loading is None else [self.loading])
        oldest, newest = min(told), max(told) + AHEAD * self.updates_per_batch
        if min(versions) < oldest or max(versions) > newest:
            wrong = min(versions) if min(versions) < oldest else max(versions)
            raise EngineFaulty(f"{member.engine.url} answered with weights of version {wrong}; version {oldest} is loaded")

    async def _abort(self, engine: Engine, rid: str) -> None:
        try:
            async with asyncio.timeout(ABORT_TIMEOUT):
                await engine.abort(rid)
        except Exception:  # nobody waits for this answer any more; the engine ends it at its token limit
            return

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # ------------------------------------------------------------------------------------------------------ failing

    def _down(self, member: Member, error: str) -> None:
        member.failed += 1
        member.error = error
        if not member.up:
            return
        member.up = False
        if self._members.get(member.engine.url) is member:
            member.probe = asyncio.get_running_loop().create_task(self._probe(member))

    def _faulted(self, member: Member, fault: EngineFaulty) -> None:
        """Count a wrong answer; too many in a row, and the engine is left out for a while."""
        if member.fault is fault:
            return
        member.fault, member.error = fault, str(fault)
        member.failed += 1
        member.faults += 1
        if member.faults < MAX_FAULTS or not member.up or not self._ready(member):
            return
        member.up = False
        if self._members.get(member.engine.url) is member:
            member.probe = asyncio.get_running_loop().create_task(self._try_again(member))

    async def _try_again(self, member: Member) -> None:
        """Let an engine come back after a while; one more wrong answer, and it is out for longer."""
        pause, member.pause = member.pause, min(2 * member.pause, LONGEST_PAUSE)
        await asyncio.sleep(pause)
        member.faults = MAX_FAULTS - 1
        await self._probe(member)

    async def _probe(self, member: Member) -> None:
        """Ask an engine that failed until it is well and holds the current weights."""
        pause = FIRST_PROBE
        while True:
            await asyncio.sleep(pause)
            pause = min(2 * pause, SLOWEST_PROBE)
            if await self._is_well(member.engine):
                member.up, member.probe = True, None
                self._wake()
                return

    async def _is_well(self, engine: Engine) -> bool:
        try:
            async with asyncio.timeout(SLOWEST_PROBE):
                if not await engine.health(SLOWEST_PROBE):
                    return False
                if self.version is None:
                    return True
                return str((await engine.model_info()).get("weight_version")) == str(self.version)
        except Exception:  # whatever it was, the engine is not well yet
            return False
