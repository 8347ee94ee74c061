"""An engine behind SGLang's HTTP contract (0.5.23): the embedded one, or a real SGLang server."""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from relax_sdk.errors import EngineAborted, EngineDenied, EngineError, EngineFaulty, EngineUnavailable
from relax_sdk.trajectory import VersionSpan
from relax_server.engines.base import GenerateRequest, Generation, MediaItem, PauseMode
from relax_server.json_read import loads

LARGE = 128 << 10
"""Bytes of an answer that is read in a thread; that of some thousand tokens is read in a millisecond or two."""
CONTROL_TIMEOUT = 120.0
"""Seconds for everything but generation and health."""


class HttpEngine:
    """`Engine` over HTTP, as the embedded engine is; every answer is checked before it is returned.

    Args:
        url: for example `http://127.0.0.1:30000`.
        token: sent with every call; empty: none is.
        media_root: the media folder as the engine sees it; relative media paths are sent as paths inside it.
        inline_media: send the bytes of media, for an engine that cannot read our files.
        routed_shape: (layers, top_k) of routed experts, for servers that do not state it in their answers.
        control_timeout: seconds for commands such as a weight update.
    """

    def __init__(
        self,
        url: str,
        media_root: str | Path | None = None,
        *,
        token: str = "",
        inline_media: bool = False,
        routed_shape: tuple[int, int] | None = None,
        control_timeout: float = CONTROL_TIMEOUT,
    ) -> None:
        self.url = url.rstrip("/")
        self.deals_seeds = True
        self._token = token
        self._media_root = Path(media_root) if media_root is not None else None
        self._inline_media = inline_media
        self._routed_shape = routed_shape
        self._control_timeout = control_timeout
        self._session: aiohttp.ClientSession | None = None

    # -------------------------------------------------------------------------------------------------- generating

    async def generate(self, request: GenerateRequest, timeout: float) -> list[Generation]:
        raw = await self._bytes("POST", "/generate", self._payload(request), timeout)
        if len(raw) > LARGE:
            generations = await asyncio.to_thread(self._generations, raw, request)
        else:
            generations = self._generations(raw, request)
        for generation in generations:
            if generation.finish_reason == "abort":
                raise self._aborted(generation)
        return generations

    async def stream(self, request: GenerateRequest, timeout: float) -> AsyncIterator[Generation]:
        if request.n != 1:
            raise EngineError(f"a streamed request must have n = 1, got {request.n}")
        payload = {**self._payload(request), "stream": True}
        try:
            async with self._open().post(
                self.url + "/generate", data=orjson.dumps(payload), timeout=aiohttp.ClientTimeout(total=timeout)
            ) as response:
                if response.status != 200:
                    raise self._refused("/generate", response.status, await response.read())
                finished = False
                async for event in events(response):
                    if "error" in event:
                        raise EngineError(str(self._refused("/generate", 500, orjson.dumps(event))))  # SGLang's way of refusing
                    generation = self._read(event, request)
                    finished = bool(generation.finish_reason)
                    if generation.finish_reason == "abort":
                        raise self._aborted(generation)
                    yield generation
                if not finished:
                    raise self._wrong("the stream ended before the response did")
        except TimeoutError as error:
            raise EngineUnavailable(f"{self.url}/generate did not finish within {timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self.url}/generate: {error or type(error).__name__}") from error

    def _payload(self, request: GenerateRequest) -> dict[str, Any]:
        s = request.sampling
        sampling: dict[str, Any] = {
            "max_new_tokens": s.max_new_tokens,
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "ignore_eos": s.ignore_eos,
            "skip_special_tokens": False,
            "n": request.n,
        }
        if s.stop:
            sampling["stop"] = list(s.stop)
        if s.stop_token_ids:
            sampling["stop_token_ids"] = list(s.stop_token_ids)
        seed = list(request.seeds) or s.sampling_seed
        if seed is not None:
            sampling["sampling_seed"] = seed
        payload: dict[str, Any] = {
            "input_ids": request.input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "return_prompt_token_ids": True,
        }
        for kind in ("image", "audio", "video"):
            items = [self._locate(item) for item in request.media if item.ref.kind == kind]
            if items:  # with n > 1 SGLang takes a list for each sample's prompt, and deals a flat one out among the samples
                payload[f"{kind}_data"] = [items] if request.n > 1 else items
        if request.rid:
            payload["rid"] = request.rid
        if request.return_routed_experts:
            payload["return_routed_experts"] = True
        return payload

    def _locate(self, item: MediaItem) -> str:
        if item.url.startswith("data:"):
            return item.url
        if self._inline_media:
            return f"data:{item.ref.mime};base64,{base64.b64encode(Path(item.url).read_bytes()).decode()}"
        return item.url if self._media_root is None else str(self._media_root / item.url)

    def _generations(self, raw: bytes, request: GenerateRequest) -> list[Generation]:
        """The answers to a request, read and checked.

        Raises:
            EngineError: they cannot be right.
        """
        body = self._parsed("/generate", raw)
        answers = body if isinstance(body, list) else [body]
        if len(answers) != request.n:
            raise self._wrong(f"{len(answers)} answers to a request with n = {request.n}")
        return [self._read(answer, request) for answer in answers]

    def _read(self, answer: Any, request: GenerateRequest) -> Generation:
        """One answer, checked.

        Raises:
            EngineError: it cannot be right; the message says why.
        """
        try:
            meta = answer["meta_info"]
            ids, rows, prompt_ids = answer["output_ids"], meta["output_token_logprobs"], answer["prompt_token_ids"]
            finish_reason = (meta["finish_reason"] or {"type": ""})["type"]
        except KeyError as error:
            raise self._wrong(f"the field {error} is missing") from error
        except TypeError as error:
            raise self._wrong(f"it is not of the form that SGLang has ({error})") from error
        if not (_token_ids(ids) and _token_ids(prompt_ids) and isinstance(rows, list) and all(map(_logprob_row, rows))):
            raise self._wrong("its tokens or logprobs are not of the form that SGLang has")
        logprobs = [row[0] for row in rows]
        if [row[1] for row in rows] != ids:
            raise self._wrong(f"{len(rows)} logprobs that do not belong to its {len(ids)} tokens")
        wrong = [p for p in logprobs if not isinstance(p, (int, float)) or not math.isfinite(p) or p > 1e-3]
        if wrong:
            raise self._wrong(f"{len(wrong)} of {len(logprobs)} logprobs are not finite negative numbers, such as {wrong[0]!r}")
        if len(prompt_ids) < len(request.input_ids):
            raise self._wrong(f"{len(prompt_ids)} prompt tokens where {len(request.input_ids)} were sent")
        generation = Generation(
            prompt_ids=prompt_ids,
            response_ids=ids,
            logprobs=logprobs,
            weight_versions=self._versions(meta, len(ids)),
            finish_reason=finish_reason,
            cached_tokens=meta.get("cached_tokens") or 0,
            meta={k: v for k, v in meta.items() if k not in _BULKY},
        )
        if request.return_routed_experts and finish_reason not in ("", "abort"):
            self._read_routes(meta, generation)
        return generation

    def _versions(self, meta: Mapping[str, Any], n: int) -> list[VersionSpan]:
        raw = meta.get("weight_versions")
        if raw is None:
            raw = [{"version": meta.get("weight_version"), "start": 0, "end": n}] if n else []
        spans, at = [], 0
        for row in raw:
            try:
                span = VersionSpan(int(row["version"]), int(row["start"]), int(row["end"]))
            except (KeyError, TypeError, ValueError) as error:
                raise self._wrong(
                    f"the weight version {row!r} is not a number (start SGLang with --weight-version 0)"
                ) from error
            if span.end == span.start:
                continue
            if span.start != at or span.end < span.start:
                raise self._wrong(f"weight versions {raw} that do not cover its {n} tokens one after another")
            spans.append(span)
            at = span.end
        if at != n:
            raise self._wrong(f"weight versions {raw} that do not cover its {n} tokens")
        return spans

    def _read_routes(self, meta: Mapping[str, Any], generation: Generation) -> None:
        raw = meta.get("routed_experts")
        if not isinstance(raw, str):
            raise self._wrong("no routed_experts though they were asked for (is it started with them enabled?)")
        try:
            data = base64.b64decode(raw, validate=True)
        except binascii.Error as error:
            raise self._wrong(f"routed_experts are not base64 ({error})") from error
        tokens = len(generation.prompt_ids) + len(generation.response_ids) - 1
        stated = meta.get("routed_experts_shape")
        if stated is None and self._routed_shape is None:
            raise EngineError(f"{self.url} does not state the shape of routed_experts; give HttpEngine a routed_shape")
        shape = list(stated) if stated is not None else [tokens, *(self._routed_shape or ())]
        if shape[0] != tokens or 4 * math.prod(shape) != len(data):
            raise self._wrong(f"{len(data)} bytes of routed_experts, shape {shape}, for {tokens} tokens")
        generation.routed_experts, generation.routed_shape = data, shape

    # ---------------------------------------------------------------------------------------------------- commands

    async def abort(self, rid: str | None) -> None:
        await self._control("/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    async def update_weights(self, path: str, version: int, flush_cache: bool = True) -> None:
        payload = {"model_path": path, "weight_version": str(version), "flush_cache": flush_cache}
        answer = await self._control("/update_weights_from_disk", payload)
        if not isinstance(answer, dict) or not answer.get("success"):
            raise EngineError(f"{self.url} did not load the weights in {path}: {answer}")

    async def pause(self, mode: PauseMode) -> None:
        await self._control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._control("/continue_generation", {})

    async def release_memory(self) -> None:
        await self._control("/release_memory_occupation", {})

    async def resume_memory(self) -> None:
        await self._control("/resume_memory_occupation", {})

    async def flush_cache(self) -> None:
        await self._control("/flush_cache", {})

    async def health(self, timeout: float = 5.0) -> bool:
        try:
            await self._bytes("GET", "/health", None, timeout)
        except EngineError:
            return False
        return True

    async def server_info(self) -> dict[str, Any]:
        return await self._json("GET", "/server_info", None, self._control_timeout)

    async def model_info(self) -> dict[str, Any]:
        return await self._json("GET", "/model_info", None, self._control_timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ---------------------------------------------------------------------------------------------------- transport

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            headers = JSON | {"Authorization": f"Bearer {self._token}"} if self._token else JSON
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers)
        return self._session

    async def _control(self, path: str, payload: Mapping[str, Any]) -> Any:
        raw = await self._bytes("POST", path, payload, self._control_timeout)
        try:
            return orjson.loads(raw) if raw else None
        except orjson.JSONDecodeError:
            return raw.decode(errors="replace")  # some SGLang routes answer in words

    async def _json(self, method: str, path: str, payload: Mapping[str, Any] | None, timeout: float) -> Any:
        return self._parsed(path, await self._bytes(method, path, payload, timeout))

    def _parsed(self, path: str, raw: bytes) -> Any:
        try:
            return loads(raw)
        except orjson.JSONDecodeError as error:
            raise self._wrong(f"{path} answered something that is not JSON: {raw[:200]!r}") from error

    async def _bytes(self, method: str, path: str, payload: Mapping[str, Any] | None, timeout: float) -> bytes:
        return (await self._exchange(method, path, payload, timeout))[0]

    async def _exchange(
        self,
        method: str,
        path: str,
        payload: Mapping[str, Any] | None,
        timeout: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, Mapping[str, str]]:
        """Body and headers of an answer."""
        data = None if payload is None else orjson.dumps(payload)
        try:
            async with self._open().request(
                method,
                self.url + path,
                data=data,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=timeout),
            ) as response:
                raw = await response.read()
        except TimeoutError as error:
            raise EngineUnavailable(f"{self.url}{path} did not answer within {timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self.url}{path}: {error or type(error).__name__}") from error
        if response.status != 200:
            raise self._refused(path, response.status, raw)
        return raw, response.headers

    def _refused(self, path: str, status: int, raw: bytes) -> EngineError:
        text = f"{self.url}{path} answered {status}: {_message(raw)}"
        if status == 499:
            return EngineAborted(text)
        if status in (401, 403):
            return EngineDenied(f"{text}. {HOW}")
        if status in (502, 503, 504):
            return EngineUnavailable(text)
        return EngineFaulty(text) if status >= 500 else EngineError(text)

    def _wrong(self, what: str) -> EngineError:
        return EngineFaulty(f"{self.url} gave an answer that cannot be right: {what}")

    def _aborted(self, generation: Generation) -> EngineAborted:
        reason = generation.meta.get("finish_reason") or {}
        n = len(generation.response_ids)
        return EngineAborted(f"{self.url}: aborted after {n} tokens ({reason.get('message') or 'no reason given'})")


JSON = {"Content-Type": "application/json"}
HOW = (
    "Give the token of an engine that runs elsewhere by --engine-token-file of `relax serve`, by --token-file of "
    "`relax engine add`, or in $RELAX_ENGINE_TOKEN"
)
"""What to do where an engine wants a token."""
_BULKY = frozenset({"output_token_logprobs", "input_token_logprobs", "routed_experts"})


def _token_ids(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _logprob_row(value: Any) -> bool:
    return isinstance(value, list) and len(value) >= 2


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON bodies of server-sent events, up to `[DONE]`; an event may be of any length."""
    buffer = b""
    async for chunk in response.content.iter_any():
        buffer += chunk
        *whole, buffer = buffer.split(b"\n\n")
        for event in whole:
            data = event.removeprefix(b"data: ")
            if data == b"[DONE]":
                return
            yield orjson.loads(data)


def _message(raw: bytes) -> str:
    """The human part of SGLang's several kinds of error bodies."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw[:500].decode(errors="replace")
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:2000]
