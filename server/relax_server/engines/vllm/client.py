"""A client of vLLM's OpenAI completions, with token ids in and out."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from relax_sdk.errors import EngineAborted, EngineError, EngineUnavailable
from relax_sdk.trajectory import VersionSpan, derive_seed
from relax_server.engines.base import GenerateRequest, Generation, PauseMode
from relax_server.engines.http import CONTROL_TIMEOUT, JSON, HttpEngine, events
from relax_server.engines.weight_shapes import WeightShapes, read_shapes

ROUTE = "/v1/completions"
RID = "x-relax-rid"
VERSION = "x-relax-weight-version"
"""Headers of `inside/relax_gate.py`."""

COLDEST = 0.01
"""vLLM raises any temperature between 0 and this one to it."""


@dataclass(frozen=True)
class Leg:
    """Part of an answer: what came between two weight updates."""

    ids: list[int]
    logprobs: list[float]
    version: int
    finish_reason: str
    """Empty while it grows; `abort` where an update cut it short."""
    cached_tokens: int = 0


@dataclass(eq=False)
class Ask:
    """One request, over as many calls as weight updates make of it."""

    request: GenerateRequest
    until: float
    """Moment on the monotonic clock."""
    aborted: bool = False

    def rest(self, legs: list[Leg]) -> GenerateRequest:
        """What is still to be asked for after some legs of one answer."""
        if not legs:
            return self.request
        ids = [id for leg in legs for id in leg.ids]
        asked = self.request.sampling
        seed = asked.sampling_seed
        if seed is not None:  # the generator begins anew; with the same seed it would repeat the first leg's draws
            seed = derive_seed(seed, len(ids)) % 2**31
        sampling = replace(asked, max_new_tokens=asked.max_new_tokens - len(ids), sampling_seed=seed)
        return replace(self.request, input_ids=[*self.request.input_ids, *ids], sampling=sampling, n=1)

    def generation(self, legs: list[Leg]) -> Generation:
        """An answer of some legs."""
        ids = [id for leg in legs for id in leg.ids]
        spans: list[VersionSpan] = []
        at = 0
        for leg in legs:
            if spans and spans[-1].version == leg.version:
                spans[-1] = VersionSpan(leg.version, spans[-1].start, at + len(leg.ids))
            elif leg.ids:
                spans.append(VersionSpan(leg.version, at, at + len(leg.ids)))
            at += len(leg.ids)
        return Generation(
            prompt_ids=list(self.request.input_ids),
            response_ids=ids,
            logprobs=[logprob for leg in legs for logprob in leg.logprobs],
            weight_versions=spans,
            finish_reason=legs[-1].finish_reason,
            cached_tokens=legs[0].cached_tokens,
        )


class VllmEngine(HttpEngine):
    """`Engine` over vLLM 0.32 as `VllmProcess` starts it; text only.

    Prompts are sent as token ids to `/v1/completions`, which returns ids and logprobs; commands go to the routes that
    `inside/relax_gate.py` adds. An answer that a weight update cuts short is gone on with from its tokens in a new request, so
    that no key or value of old weights is attended after the update. This is so after `pause("in_place")`, too. A text in
    `SamplingParams.stop` is not found where it begins before an update and ends after it.

    Logprobs are those of the distribution sampled from, after temperature, `top_k` and `top_p`.

    Args:
        url: for example `http://127.0.0.1:8000`.
        token: sent with every call; empty: none is.
        control_timeout: seconds for commands such as a weight update.
    """

    def __init__(self, url: str, *, token: str = "", control_timeout: float = CONTROL_TIMEOUT) -> None:
        super().__init__(url, token=token, control_timeout=control_timeout)
        self._weights: WeightShapes | None = None
        self.deals_seeds = False
        self._asks: set[Ask] = set()
        self._longest: int | None = None
        """Tokens of a prompt and its answer."""

    # -------------------------------------------------------------------------------------------------- generating

    async def generate(self, request: GenerateRequest, timeout: float) -> list[Generation]:
        await self._check(request)
        with self._asking(request, timeout) as ask:
            answers = [asyncio.ensure_future(self._finish(ask, leg)) for leg in await self._call(ask, request)]
            try:
                return list(await asyncio.gather(*answers))
            finally:
                for answer in answers:
                    answer.cancel()

    async def stream(self, request: GenerateRequest, timeout: float) -> AsyncIterator[Generation]:
        if request.n != 1:
            raise EngineError(f"a streamed request must have n = 1, got {request.n}")
        await self._check(request)
        with self._asking(request, timeout) as ask:
            legs: list[Leg] = []
            while not legs or legs[-1].finish_reason == "abort":
                last = None
                async for last in self._stream(ask, ask.rest(legs)):
                    if last.finish_reason != "abort":
                        yield ask.generation([*legs, last])
                assert last is not None
                legs.append(last)

    async def _check(self, request: GenerateRequest) -> None:
        """Refuse what vLLM would do otherwise than asked, without a word."""
        temperature, tokens = request.sampling.temperature, len(request.input_ids) + request.sampling.max_new_tokens
        if request.media:
            raise EngineError(f"{self.url}: vLLM serves text here, and the request has {len(request.media)} media")
        if request.return_routed_experts:
            raise EngineError(f"{self.url}: vLLM does not hand out routed experts here")
        if 0 < temperature < COLDEST:
            raise EngineError(
                f"{self.url}: vLLM takes {COLDEST} in place of a temperature of {temperature}; use 0, which is greedy, or "
                f"{COLDEST} and more"
            )
        if self._longest is None:
            self._longest = int((await self.server_info())["max_model_len"])
        if tokens > self._longest:
            raise EngineError(
                f"{self.url}: {len(request.input_ids)} tokens and {request.sampling.max_new_tokens} new ones are more than the "
                f"{self._longest} that fit (--max-model-len)"
            )

    @contextmanager
    def _asking(self, request: GenerateRequest, timeout: float) -> Iterator[Ask]:
        ask = Ask(request, time.monotonic() + timeout)
        self._asks.add(ask)
        try:
            yield ask
        finally:
            self._asks.discard(ask)

    async def _finish(self, ask: Ask, leg: Leg) -> Generation:
        """An answer to its end, across all updates that cut it short."""
        legs = [leg]
        while legs[-1].finish_reason == "abort":
            legs += await self._call(ask, ask.rest(legs))
        return ask.generation(legs)

    async def _call(self, ask: Ask, request: GenerateRequest) -> list[Leg]:
        raw, headers = await self._exchange("POST", ROUTE, self._payload(request), self._left(ask), {RID: request.rid})
        try:
            body = orjson.loads(raw)
            choices = sorted(body["choices"], key=lambda choice: choice["index"])
            cached = ((body.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            legs = [self._leg(choice, self._version(headers), request, cached) for choice in choices]
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise self._wrong(f"{ROUTE} answered not as vLLM does ({error!r}): {raw[:200]!r}") from error
        if len(legs) != request.n or not all(leg.finish_reason for leg in legs):
            raise self._wrong(f"{len(legs)} answers, ended for {[leg.finish_reason for leg in legs]}, to n = {request.n}")
        return legs

    async def _stream(self, ask: Ask, request: GenerateRequest) -> AsyncIterator[Leg]:
        """One leg as it grows; the last item has a finish reason."""
        payload = {**self._payload(request), "stream": True, "stream_options": {"include_usage": True}}
        left = self._left(ask)
        try:
            async with self._open().post(
                self.url + ROUTE,
                data=orjson.dumps(payload),
                headers={**JSON, RID: request.rid},
                timeout=aiohttp.ClientTimeout(total=left),
            ) as response:
                if response.status != 200:
                    raise self._refused(ROUTE, response.status, await response.read())
                leg = Leg([], [], self._version(response.headers), "")
                async for event in events(response):
                    if "error" in event:
                        code = (event["error"] or {}).get("code") or 500
                        raise self._refused(ROUTE, int(code), orjson.dumps(event))
                    cached = ((event.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
                    leg = replace(leg, cached_tokens=cached or leg.cached_tokens)
                    for choice in event["choices"]:
                        new = self._leg(choice, leg.version, request, 0)
                        leg = replace(
                            leg, ids=leg.ids + new.ids, logprobs=leg.logprobs + new.logprobs, finish_reason=new.finish_reason
                        )
                        if not leg.finish_reason:
                            yield leg
        except TimeoutError as error:
            raise EngineUnavailable(f"{self.url}{ROUTE} did not finish within {left:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self.url}{ROUTE}: {error or type(error).__name__}") from error
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise self._wrong(f"{ROUTE} streamed not as vLLM does ({error!r})") from error
        if not leg.finish_reason and leg.ids:
            raise self._wrong("the stream ended before the response did")
        yield (
            leg if leg.finish_reason else replace(leg, finish_reason="abort")
        )  # cut before its first token, which it leaves out

    def _payload(self, request: GenerateRequest) -> dict[str, Any]:
        s = request.sampling
        payload: dict[str, Any] = {
            "prompt": request.input_ids,
            "max_tokens": s.max_new_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            # What is not stated would come from the model's generation_config.json.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": s.ignore_eos,
            "skip_special_tokens": False,
            "n": request.n,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if s.stop:
            payload["stop"] = list(s.stop)
        if s.stop_token_ids:
            payload["stop_token_ids"] = list(s.stop_token_ids)
        if s.sampling_seed is not None:
            payload["seed"] = s.sampling_seed
        return payload

    def _leg(self, choice: Mapping[str, Any], version: int, request: GenerateRequest, cached: int) -> Leg:
        """One choice, checked.

        Raises:
            EngineError: it cannot be right; the message says why.
        """
        ids = choice.get("token_ids") or []
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        prompt, reason = choice.get("prompt_token_ids"), choice.get("finish_reason") or ""
        if len(ids) != len(logprobs):
            raise self._wrong(f"{len(logprobs)} logprobs to {len(ids)} tokens")
        if not all(isinstance(p, (int, float)) and math.isfinite(p) and p <= 1e-3 for p in logprobs):
            raise self._wrong("logprobs that are not finite negative numbers")
        if prompt is not None and prompt != request.input_ids:
            raise self._wrong(f"another prompt of {len(prompt)} tokens than the {len(request.input_ids)} that were sent")
        if reason not in ("", "stop", "length", "abort"):
            raise EngineError(f"{self.url}: the response ended for {reason!r}")
        return Leg(ids, logprobs, version, reason, cached)

    def _version(self, headers: Mapping[str, str]) -> int:
        try:
            return int(headers[VERSION])
        except (KeyError, ValueError):
            raise EngineError(
                f"{self.url} does not say which weights answered (header {VERSION}); start it with `relax engine vllm`"
            ) from None

    def _left(self, ask: Ask) -> float:
        """Seconds."""
        if ask.aborted:
            raise EngineAborted(f"{self.url}: {ask.request.rid or 'the request'} was aborted")
        left = ask.until - time.monotonic()
        if left <= 0:
            raise EngineUnavailable(f"{self.url}{ROUTE} did not finish within its time")
        return left

    # ---------------------------------------------------------------------------------------------------- commands

    async def abort(self, rid: str | None) -> None:
        for ask in self._asks:  # between two legs there is nothing at the server to abort
            ask.aborted = ask.aborted or rid is None or ask.request.rid == rid
        await super().abort(rid)

    async def update_weights(self, path: str, version: int, flush_cache: bool = True) -> None:
        """As `Engine.update_weights`; `path` must be a folder on this machine, too.

        Raises:
            EngineError: names or shapes differ from the model's, or vLLM could not load them.
        """
        new = await asyncio.to_thread(read_shapes, Path(path))
        if self._weights is None:
            served = Path((await self.model_info())["model_path"])
            self._weights = await asyncio.to_thread(WeightShapes.of_served, served, new)
        self._weights.check(new, path)
        await super().update_weights(path, version, flush_cache)

    async def pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            for ask in self._asks:
                ask.aborted = True
        await super().pause(mode)
