"""The OpenAI chat route of the embedded engine, with SGLang's extras for token ids."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jinja2
from aiohttp import web

from relax_sdk.errors import EnvError, MediaError, TokenError
from relax_sdk.media import MediaRef
from relax_sdk.messages import MEDIA_SCHEME, AssistantMessage, Message
from relax_server.engines.embedded.core import Prompt, RequestError, Sequence
from relax_server.engines.embedded.inflight import InFlight
from relax_server.engines.embedded.sampling import Sampling
from relax_server.engines.embedded.web import EventStream, json_body, json_response
from relax_server.engines.embedded.wire import meta_info, parse_sampling, version_spans
from relax_server.models.media_features import Kind

if TYPE_CHECKING:
    from relax_server.engines.embedded.server import EngineServer

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "n", "logit_bias",
             "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "regex", "ebnf")  # fmt: skip
_MEDIA: dict[str, Kind] = {"image_url": "image", "audio_url": "audio", "video_url": "video"}


@dataclass(frozen=True)
class ChatRequest:
    """A chat request after parsing."""

    body: Mapping[str, Any]
    tools: list[dict[str, Any]]
    sampling: Sampling
    n: int
    prompt: Prompt

    def wants(self, flag: str) -> bool:
        return bool(self.body.get(flag))


class ChatRoute:
    """`POST /v1/chat/completions`."""

    def __init__(self, server: EngineServer) -> None:
        self.server = server
        self.processor = server.processor

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await json_body(request)
        stream = bool(body.get("stream"))
        for flag in ("return_token_ids", "return_prompt_token_ids", "return_meta_info", "return_routed_experts"):
            if stream and body.get(flag):
                raise RequestError(f"{flag} cannot be combined with stream")
        entry = self.server.begin(body.get("rid"), stream)
        try:
            chat = await self._parse(body)
            routes = chat.wants("return_routed_experts")
            sequences = self.server.submit(entry, chat.prompt, chat.sampling, chat.n, routes)
            if stream:
                return await self._stream(request, chat, entry, sequences)
            assert entry.done is not None
            await entry.done
            return json_response(self._whole(chat, entry, sequences))
        finally:
            self.server.end(entry)

    # ----------------------------------------------------------------------------------------------------- request

    async def _parse(self, body: Mapping[str, Any]) -> ChatRequest:
        messages, tools = body.get("messages"), body.get("tools") or []
        if not isinstance(messages, list) or not messages:
            raise RequestError("messages must be a list of at least one message")
        if not isinstance(tools, list):
            raise RequestError("tools must be a list")
        if body.get("tool_choice", "auto") not in ("auto", "none", None):
            raise RequestError("tool_choice: only auto and none are supported by the embedded engine")
        if (body.get("response_format") or {"type": "text"}).get("type") != "text":
            raise RequestError("response_format is not supported by the embedded engine")
        if body.get("input_ids") is not None:
            raise RequestError("input_ids are not supported by this route; use /generate")
        if body.get("tool_choice") == "none":
            tools = []
        ids, media = await self.server.builder.run(lambda: self._render(messages, tools))
        prompt = await self.server.builder.build(ids, media)
        sampling, n = self._sampling(body, self.server.scheduler.context_length - len(prompt))
        return ChatRequest(body, tools, sampling, n, prompt)

    def _render(self, messages: list[Any], tools: list[Any]) -> tuple[list[int], dict[Kind, list[str]]]:
        """Token ids in wire form, and the media by kind in the order they appear."""
        sources: dict[Kind, list[str]] = {"image": [], "audio": [], "video": []}
        refs: dict[str, MediaRef] = {}
        try:
            parsed = [Message.from_openai(_with_media_named(m, sources, refs), refs) for m in messages]
            return self.processor.render(parsed, tools).ids, sources
        except (EnvError, MediaError, TokenError, jinja2.TemplateError) as error:
            raise RequestError(str(error)) from error
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise RequestError(f"a message or tool is malformed ({type(error).__name__}: {error})") from error

    def _sampling(self, body: Mapping[str, Any], room: int) -> tuple[Sampling, int]:
        raw = {key: body[key] for key in _SAMPLING if body.get(key) is not None}
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        raw["max_new_tokens"] = max(1, room) if limit is None else limit
        if body.get("seed") is not None:
            raw["sampling_seed"] = body["seed"]
        sampling, n = parse_sampling(raw, self.processor.vocab_size)
        top = body.get("top_logprobs") or 0
        if not isinstance(top, int) or not 0 <= top <= 64:
            raise RequestError(f"top_logprobs = {top!r}; allowed: int from 0 to 64")
        if top and not body.get("logprobs"):
            raise RequestError("top_logprobs needs logprobs: true")
        return replace(sampling, top_logprobs=top), n

    # ---------------------------------------------------------------------------------------------------- response

    def _whole(self, chat: ChatRequest, entry: InFlight, sequences: list[Sequence]) -> dict[str, Any]:
        first = sequences[0]
        return {
            **self._head(entry, "chat.completion"),
            "choices": [self._choice(chat, entry, s) for s in sequences],
            "usage": self._usage(sequences),
            "metadata": {
                "weight_version": first.versions[-1] if first.versions else self.server.scheduler.weight_version,
                "weight_versions": version_spans(first.versions),
            },
        }

    def _head(self, entry: InFlight, kind: str) -> dict[str, Any]:
        return {"id": entry.rid, "object": kind, "created": int(time.time()), "model": self.server.model_path}

    def _choice(self, chat: ChatRequest, entry: InFlight, sequence: Sequence) -> dict[str, Any]:
        message, reason = self._message(chat, sequence)
        wire: dict[str, Any] = {"role": "assistant", "content": message.text or None}
        if message.tool_calls:
            wire["tool_calls"] = _tool_calls(message, entry.rid, sequence.index)
        else:
            wire["content"] = message.text
        choice: dict[str, Any] = {
            "index": sequence.index,
            "message": wire,
            "logprobs": self._logprobs(sequence, 0, len(sequence.out_ids)) if chat.wants("logprobs") else None,
            "finish_reason": reason,
            "matched_stop": None if sequence.finish is None else sequence.finish.matched,
            "weight_versions": version_spans(sequence.versions),
        }
        if chat.wants("return_prompt_token_ids"):
            choice["prompt_token_ids"] = sequence.prompt.ids
        if chat.wants("return_token_ids"):
            choice["response_token_ids"] = sequence.out_ids
        if chat.wants("return_meta_info") or chat.wants("return_routed_experts"):
            version = self.server.scheduler.weight_version
            choice["meta_info"] = meta_info(sequence, len(sequence.out_ids), version, entry.began, chat.wants("logprobs"))
        return choice

    def _message(self, chat: ChatRequest, sequence: Sequence) -> tuple[AssistantMessage, str]:
        """A finished response as a message, and OpenAI's finish reason.

        Raises:
            RequestError: the engine failed.
        """
        finish = sequence.finish
        assert finish is not None
        if finish.status != 200:
            raise RequestError(finish.message, finish.status)
        message = self.processor.parse(_untailed(sequence), finish.type, chat.tools)
        if isinstance(finish.matched, str) and finish.matched in message.text:
            text = message.text[: message.text.rindex(finish.matched)]
            message = Message.from_openai({"role": "assistant", "content": text})  # type: ignore[assignment]
        return message, "tool_calls" if message.tool_calls and finish.type == "stop" else finish.type  # type: ignore[return-value]

    def _logprobs(self, sequence: Sequence, start: int, stop: int) -> dict[str, Any]:
        rows = []
        for i in range(start, stop):
            row = self._token(sequence.out_ids[i], sequence.logprobs[i])
            top = sequence.top[i] if i < len(sequence.top) else []
            rows.append({**row, "top_logprobs": [self._token(id, p) for p, id in top]})
        return {"content": rows}

    def _token(self, id: int, logprob: float) -> dict[str, Any]:
        text = self.processor.decode([id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _usage(self, sequences: list[Sequence]) -> dict[str, Any]:
        prompt, done = len(sequences[0].prompt), sum(len(s.out_ids) for s in sequences)
        cached = {"cached_tokens": sequences[0].cached_tokens}
        return {
            "prompt_tokens": prompt,
            "completion_tokens": done,
            "total_tokens": prompt + done,
            "prompt_tokens_details": cached,
        }

    # ------------------------------------------------------------------------------------------------------ stream

    async def _stream(
        self, request: web.Request, chat: ChatRequest, entry: InFlight, sequences: list[Sequence]
    ) -> web.StreamResponse:
        head = self._head(entry, "chat.completion.chunk")
        deltas = [_Delta(self, chat, s) for s in sequences]
        async with EventStream(request) as send:
            for delta in deltas:
                first = {"index": delta.sequence.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                await send({**head, "choices": [first]})
            async for sequence in entry.updates():
                try:
                    choices = deltas[sequence.index].advance(entry.rid)
                except RequestError as error:
                    await send({"error": {"message": str(error), "code": error.status}})
                    return send.response
                for choice in choices:
                    await send({**head, "choices": [choice]})
            if (chat.body.get("stream_options") or {}).get("include_usage"):
                await send({**head, "choices": [], "usage": self._usage(sequences)})
        return send.response


class _Delta:
    """What of one response was already sent."""

    def __init__(self, route: ChatRoute, chat: ChatRequest, sequence: Sequence) -> None:
        self.route = route
        self.chat = chat
        self.sequence = sequence
        self.tokens = 0
        self.text = ""

    def advance(self, rid: str) -> list[dict[str, Any]]:
        """Chunks for what is new; the last one carries the finish reason, tool calls come whole before it."""
        sequence = self.sequence
        finished = sequence.finish is not None
        n = len(sequence.out_ids) if finished else len(sequence.versions)
        if finished:
            message, reason = self.route._message(self.chat, sequence)
            text = message.text
        else:
            message, reason = None, None
            text = self._settled(sequence.out_ids[:n])
        out: list[dict[str, Any]] = []
        new = text[len(self.text) :]
        if new:
            choice = self._choice({"content": new})
            if self.chat.wants("logprobs"):
                choice["logprobs"] = self.route._logprobs(sequence, self.tokens, n)
                self.tokens = n
            self.text = text
            out.append(choice)
        if message is not None and message.tool_calls:
            calls = _tool_calls(message, rid, sequence.index)
            out.append(self._choice({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}))
        if reason is not None:
            last = self._choice({}, reason)
            if self.chat.wants("logprobs") and self.tokens < n:
                last["logprobs"] = self.route._logprobs(sequence, self.tokens, n)
            out.append(last)
        return out

    def _choice(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": self.sequence.index, "delta": delta, "finish_reason": reason}

    def _settled(self, ids: list[int]) -> str:
        """The text that later tokens cannot change: no half character, no part of a stop string or tool call."""
        processor = self.route.processor
        text = processor.decode([i for i in ids if i not in processor.eos_ids])
        text = text.split("<tool_call>", 1)[0].rstrip("\ufffd")
        hold = max((len(s) - 1 for s in self.chat.sampling.stop), default=0)
        return text[: max(len(text) - hold, len(self.text))] if hold else text


def _untailed(sequence: Sequence) -> list[int]:
    """Response ids without the stop token that the caller named."""
    finish = sequence.finish
    if finish is not None and finish.type == "stop" and isinstance(finish.matched, int):
        return sequence.out_ids[:-1]
    return sequence.out_ids


def _tool_calls(message: AssistantMessage, rid: str, index: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{rid}_{index}_{i}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for i, call in enumerate(message.tool_calls)
    ]


def _with_media_named(message: Mapping[str, Any], sources: dict[Kind, list[str]], refs: dict[str, MediaRef]) -> dict[str, Any]:
    """A message whose media parts are replaced by names in `refs`; what they were goes to `sources`."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts: list[Any] = []
    for part in content:
        kind = _MEDIA.get(part.get("type"))
        if part.get("type") == "input_audio":
            kind, url = "audio", f"data:audio/wav;base64,{part['input_audio']['data']}"
        elif kind is not None:
            given = part[part["type"]]
            url = given["url"] if isinstance(given, Mapping) else given
        else:
            parts.append(part)
            continue
        name = str(len(refs))
        refs[name] = MediaRef(name, f"{kind}/*", 0)
        sources[kind].append(url)
        parts.append({"type": f"{kind}_url", f"{kind}_url": {"url": MEDIA_SCHEME + name}})
    return {**message, "content": parts}
