"""The HTTP side of the embedded engine: SGLang's native routes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from aiohttp import web

from relax_sdk.errors import ConfigError
from relax_server.engines.base import PauseMode
from relax_server.engines.embedded.control import TAGS, Control
from relax_server.engines.embedded.core import Prompt, RequestError, Sequence
from relax_server.engines.embedded.inflight import InFlight
from relax_server.engines.embedded.loop import ModelLoop
from relax_server.engines.embedded.prompts import PromptBuilder
from relax_server.engines.embedded.sampling import Sampling
from relax_server.engines.embedded.sglang_json import meta_info, parse_sampling
from relax_server.engines.embedded.web import EventStream, error_bodies, json_body, json_response
from relax_server.engines.embedded.weight_reader import WeightReader
from relax_server.guard import Guard
from relax_server.guard.on_aiohttp import guarded
from relax_server.models.media_features import Kind

T = TypeVar("T")

MAX_BODY = 256 * 2**20
"""Bytes of a request body; media may come inside it."""
COMMAND_TIMEOUT = 600.0
"""Seconds that the model thread may take to get to a command."""
HEALTH_TIMEOUT = 20.0


class EngineServer:
    """Routes over a model loop, for callers that the guard lets in; lives on one event loop."""

    def __init__(self, control: Control, builder: PromptBuilder, model_path: Path, threads: int, guard: Guard) -> None:
        self.guard = guard
        self.control = control
        self.scheduler = control.scheduler
        self.builder = builder
        self.processor = builder.processor
        self.model_path = str(model_path)
        self.reader = WeightReader(model_path, control.scheduler.runner.dtype)
        self.inflight: dict[str, InFlight] = {}
        self._events = asyncio.get_running_loop()
        self._update = asyncio.Lock()
        self.loop = ModelLoop(control, threads, self._deliver)
        self.loop.start()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY, middlewares=[guarded(self.guard), error_bodies])
        post = {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/update_weights_from_disk": self.update_weights,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/release_memory_occupation": self.release,
            "/resume_memory_occupation": self.restore,
            "/flush_cache": self.flush_cache,
        }
        get = {
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/flush_cache": self.flush_cache,
        }
        app.add_routes([web.post(path, handler) for path, handler in post.items()])
        app.add_routes([web.get(path, handler) for path, handler in get.items()])
        return app

    async def close(self) -> None:
        """End the model thread and the media threads."""
        self.loop.stop()
        self.builder.close()
        await asyncio.to_thread(self.loop.join, 10)

    def _deliver(self, events: list[Sequence]) -> None:
        self._events.call_soon_threadsafe(self._notify, events)

    def _notify(self, events: list[Sequence]) -> None:
        for sequence in events:
            sequence.notify(sequence)

    async def command(self, work: Callable[[], T]) -> T:
        """Run something on the model thread, between two steps."""
        return await asyncio.wait_for(asyncio.wrap_future(self.loop.call(work)), COMMAND_TIMEOUT)

    # -------------------------------------------------------------------------------------------------- generating

    def begin(self, rid: Any, stream: bool) -> InFlight:
        """Enter a request, so that it can be aborted while its media are still being read.

        Raises:
            RequestError: the rid is in use, or the engine cannot generate now (status 503).
        """
        if self.control.refusal:
            raise RequestError(self.control.refusal, 503)
        if rid is not None and not isinstance(rid, str):
            raise RequestError(f"rid must be a string, got {type(rid).__name__}")
        rid = rid or uuid.uuid4().hex
        if rid in self.inflight:
            raise RequestError(f"rid {rid!r} is in use by a request in flight")
        entry = InFlight(rid, news=asyncio.Queue() if stream else None)
        self.inflight[rid] = entry
        return entry

    def end(self, entry: InFlight) -> None:
        """Leave; what still runs (the client went away) is aborted."""
        self.inflight.pop(entry.rid, None)
        if entry.left:
            self.loop.call(lambda: self.scheduler.abort(entry.rid, "the client disconnected"))

    def submit(self, entry: InFlight, prompt: Prompt, sampling: Sampling, seeds: list[int], routes: bool) -> list[Sequence]:
        """Queue the sequences of a request, one for each seed.

        Raises:
            RequestError: it can never fit, or routes are not recorded.
        """
        total, limit = len(prompt) + sampling.max_new_tokens, self.scheduler.context_length
        if total > limit:
            raise RequestError(
                f"{len(prompt)} prompt tokens and max_new_tokens = {sampling.max_new_tokens} are {total} tokens; this engine "
                f"holds {limit} at most (context length {self.scheduler.runner.context_length}, "
                f"KV slots {self.scheduler.config.capacity})"
            )
        if routes and not self.scheduler.config.record_routes:
            raise RequestError("return_routed_experts: the engine was started without --return-routed-experts")
        sequences = [
            Sequence(entry.rid, i, prompt, sampling, seed, entry.notify, entry.news is not None, want_routes=routes)
            for i, seed in enumerate(seeds)
        ]
        entry.left = len(seeds)
        entry.done = self._events.create_future()
        if entry.aborted:
            raise RequestError("aborted while its prompt was being prepared", 499)
        self.loop.submit(sequences)
        return sequences

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await json_body(request)
        sampling, seeds = parse_sampling(body.get("sampling_params"), self.processor.vocab_size)
        if body.get("logprob_start_len", -1) not in (-1, None):
            raise RequestError("logprob_start_len is not supported by the embedded engine: only output logprobs are given")
        for key in ("input_embeds", "session_params", "lora_path", "return_hidden_states", "token_ids_logprob"):
            if body.get(key):
                raise RequestError(f"{key} is not supported by the embedded engine")
        top = body.get("top_logprobs_num") or 0
        if not isinstance(top, int) or not 0 <= top <= 64:
            raise RequestError(f"top_logprobs_num = {top!r}; allowed: int from 0 to 64")
        if top:
            sampling = Sampling(**{**vars(sampling), "top_logprobs": top})
        stream = bool(body.get("stream"))
        entry = self.begin(body.get("rid"), stream)
        try:
            prompt = await self.builder.build(self._prompt_ids(body), _media(body))
            sequences = self.submit(entry, prompt, sampling, seeds, bool(body.get("return_routed_experts")))
            if stream:
                return await self._stream(request, body, entry, sequences)
            assert entry.done is not None
            await entry.done
            answers = [self._answer(s, body, entry) for s in sequences]
            return json_response(answers[0] if len(seeds) == 1 else answers)
        finally:
            self.end(entry)

    def _prompt_ids(self, body: Mapping[str, Any]) -> list[int]:
        ids, text = body.get("input_ids"), body.get("text")
        if (ids is None) == (text is None):
            raise RequestError("a request needs input_ids or text, and not both")
        if text is not None:
            if not isinstance(text, str):
                raise RequestError("text must be one string; send one prompt a request")
            return self.processor.tokenizer.encode(text, add_special_tokens=False)
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise RequestError("input_ids must be one list of integers; send one prompt a request")
        return ids

    def _answer(self, sequence: Sequence, body: Mapping[str, Any], entry: InFlight) -> dict[str, Any]:
        """One response as it stands.

        Raises:
            RequestError: the engine failed.
        """
        finish = sequence.finish
        if finish is not None and finish.status != 200:
            raise RequestError(finish.message, finish.status)
        n = len(sequence.out_ids) if finish is not None else len(sequence.versions)  # versions are appended last
        ids = sequence.out_ids[:n]
        answer: dict[str, Any] = {
            "text": self.text(sequence, ids),
            "output_ids": ids,
            "meta_info": meta_info(sequence, n, self.scheduler.weight_version, entry.began, bool(body.get("return_logprob"))),
        }
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = sequence.prompt.ids
        return answer

    def text(self, sequence: Sequence, ids: list[int]) -> str:
        """Response text as SGLang trims it: without what stopped it."""
        finish = sequence.finish
        if finish is not None and finish.type == "stop" and isinstance(finish.matched, int):
            ids = ids[:-1]
        text = self.processor.tokenizer.decode(ids, skip_special_tokens=sequence.sampling.skip_special_tokens)
        if finish is not None and isinstance(finish.matched, str):
            text = text[: text.rindex(finish.matched)] if finish.matched in text else text
        return text

    async def _stream(
        self, request: web.Request, body: Mapping[str, Any], entry: InFlight, sequences: list[Sequence]
    ) -> web.StreamResponse:
        """Server-sent events, each with all tokens so far."""
        many = len(sequences) > 1
        async with EventStream(request) as send:
            async for sequence in entry.updates():
                try:
                    answer = self._answer(sequence, body, entry)
                except RequestError as error:
                    await send({"error": {"message": str(error), "code": error.status}})
                    break
                await send({**answer, "index": sequence.index} if many else answer)
        return send.response

    # ---------------------------------------------------------------------------------------------------- commands

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        everything, rid = bool(body.get("abort_all")), body.get("rid")
        if not everything and not isinstance(rid, str):
            raise RequestError("abort_request needs rid (a string) or abort_all")
        await self._abort(None if everything else rid)
        return web.Response()

    async def _abort(self, rid: str | None) -> None:
        for entry in self.inflight.values():
            if rid in (None, entry.rid):
                entry.aborted = True
        await self.command(lambda: self.scheduler.abort(rid))

    async def update_weights(self, request: web.Request) -> web.Response:
        """The folder is read, and adapters are merged, while generation goes on; only the copy happens between two steps."""
        body = await json_body(request)
        path, version = body.get("model_path"), body.get("weight_version")
        try:
            if not isinstance(path, str) or not path:
                raise RequestError("model_path must name a folder")
            if version is not None and (not isinstance(version, (str, int)) or isinstance(version, bool)):
                raise RequestError(f"weight_version must be a string or an integer, got {version!r}")
            flush, abort_all = bool(body.get("flush_cache", True)), bool(body.get("abort_all_requests", False))
            async with self._update:
                self.control.require_weights()
                update = await asyncio.to_thread(self.reader.read, Path(path), self.control.weights_undefined)
                told = None if version is None else str(version)
                held = await self.command(
                    lambda: self.control.update_weights(update.tensors, told, flush, abort_all, whole=update.whole)
                )
                self.reader.taken(update)
        except (ConfigError, RequestError) as error:
            return json_response({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        return json_response({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": held})

    async def pause(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        mode = body.get("mode", "abort")
        if mode not in get_args(PauseMode):
            raise RequestError(f"mode = {mode!r}; allowed: {', '.join(get_args(PauseMode))}")
        if mode == "abort":
            for entry in self.inflight.values():
                entry.aborted = True
        await self.command(lambda: self.control.pause(mode))
        return json_response({"status": "ok", "message": f"generation paused ({mode})"})

    async def resume(self, request: web.Request) -> web.Response:
        await self.command(self.control.resume)
        return json_response({"status": "ok", "message": "generation continues"})

    async def release(self, request: web.Request) -> web.Response:
        tags = await _tags(request)
        await self.command(lambda: self.control.release(tags))
        return json_response(None)

    async def restore(self, request: web.Request) -> web.Response:
        tags = await _tags(request)
        await self.command(lambda: self.control.restore(tags))
        return json_response(None)

    async def flush_cache(self, request: web.Request) -> web.Response:
        await self.command(self.scheduler.flush_cache)
        return web.Response(text="Cache flushed.\n")

    # ------------------------------------------------------------------------------------------------------- state

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.loop.is_alive() else 503)

    async def health_generate(self, request: web.Request) -> web.Response:
        """Whether the model thread answers, and, where it may generate, generates."""
        try:
            await asyncio.wait_for(self._probe(), HEALTH_TIMEOUT)
        except (TimeoutError, RequestError) as error:
            return web.Response(status=503, text=str(error) or f"no answer from the model thread in {HEALTH_TIMEOUT:g} s")
        return web.Response()

    async def _probe(self) -> None:
        await self.command(lambda: None)
        if self.control.paused or self.control.refusal:
            return
        entry = self.begin(f"health-{uuid.uuid4().hex}", False)
        try:
            prompt = await self.builder.build([self.processor.eos_ids[0]], {})
            sequences = self.submit(entry, prompt, Sampling(max_new_tokens=1), [0], False)
            assert entry.done is not None
            await entry.done
            self._answer(sequences[0], {}, entry)
        finally:
            self.end(entry)

    async def server_info(self, request: web.Request) -> web.Response:
        s = self.scheduler
        return json_response(
            {
                "engine": "embedded",
                "model_path": self.model_path,
                "weight_version": s.weight_version,
                "running": len(s.running),
                "waiting": len(s.waiting),
                "in_flight": len(self.inflight),
                "paused": self.control.paused,
                "released": self.control.refusal,
                "cached_tokens": s.tree.n_tokens,
                "cached_media": len(s.embeddings),
                "free_tokens": s.pool.n_free,
                "max_total_num_tokens": s.config.capacity,
                "context_length": s.context_length,
                "max_running_requests": s.config.max_running,
                "chunked_prefill_size": s.config.chunk,
                "enable_return_routed_experts": s.config.record_routes,
                "dtype": str(s.runner.dtype).removeprefix("torch."),
                "stats": s.stats.to_dict(),
            }
        )

    async def model_info(self, request: web.Request) -> web.Response:
        runner = self.scheduler.runner
        return json_response(
            {
                "model_path": self.model_path,
                "tokenizer_path": self.model_path,
                "is_generation": True,
                "weight_version": self.scheduler.weight_version,
                "modalities": sorted(self.processor.modalities),
                "has_image_understanding": "image" in self.processor.modalities,
                "has_audio_understanding": "audio" in self.processor.modalities,
                "model_type": self.processor.hf_config.model_type,
                "num_hidden_layers": runner.layers,
                "num_experts_per_tok": runner.route_top_k,
            }
        )


async def _tags(request: web.Request) -> frozenset[str]:
    tags = (await json_body(request)).get("tags")
    if tags is None:
        return TAGS
    if not isinstance(tags, list) or not all(isinstance(t, str) for t in tags):
        raise RequestError("tags must be a list of strings")
    return frozenset(tags)


def _media(body: Mapping[str, Any]) -> dict[Kind, list[str]]:
    media: dict[Kind, list[str]] = {}
    kinds: tuple[Kind, ...] = ("image", "audio", "video")
    for kind in kinds:
        given = body.get(f"{kind}_data") or []
        given = [given] if isinstance(given, str) else given
        if isinstance(given, list) and len(given) == 1 and isinstance(given[0], list):
            given = given[0]  # the form that SGLang takes where n > 1
        if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
            raise RequestError(f"{kind}_data must be a path or data URI, or a list of these")
        media[kind] = given
    return media
