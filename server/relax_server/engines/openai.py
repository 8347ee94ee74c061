"""A client of any OpenAI-compatible chat model: messages in, a message out, no token ids."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import orjson

from relax_sdk.config import SamplingParams
from relax_sdk.endpoint import Endpoint
from relax_sdk.errors import ConfigError, EngineError, EngineUnavailable, EnvError
from relax_sdk.media import Audio, Media
from relax_sdk.messages import AssistantMessage, Message
from relax_sdk.retrying import PASSING, retry_after, retrying

FIRST_PAUSE = 0.5
"""Seconds before a call is tried again; doubled each time."""

FORMATS = {"audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3", "audio/mp3": "mp3"}
"""The two that OpenAI's `input_audio` knows; others go as `audio_url`, which SGLang and vLLM take."""


class ChatClient:
    """Asks one endpoint.

    Args:
        endpoint: where, and which model.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._url = endpoint.url.rstrip("/") + "/chat/completions"
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def ask(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams, timeout: float
    ) -> AssistantMessage:
        """One answer. What may pass, such as a rate limit, is tried again while there is time, after the pause that the
        server asks for.

        Raises:
            ConfigError: the sampling asks for what the OpenAI API has no word for.
            EngineUnavailable: no answer in time.
            EngineError: a refusal, an answer that is not a chat completion, or the client was closed.
        """
        body = {"model": self.endpoint.model, "messages": [wire(m) for m in messages], **parameters(sampling)}
        if tools:
            body["tools"] = list(tools)
        data, until = orjson.dumps(body), time.monotonic() + timeout

        async def once() -> AssistantMessage:
            return self._read(await self._post(data, until - time.monotonic()))

        return await retrying(EngineUnavailable, FIRST_PAUSE, seconds=timeout)(once)

    async def close(self) -> None:
        """Close connections; a call that is under way, or comes later, ends with an `EngineError` and opens no new ones."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, data: bytes, timeout: float) -> bytes:
        key = self.endpoint.api_key
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        if self._closed:
            raise EngineError(f"{self._url} was asked after its client was closed: what asked is over")
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0))
        clock = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.post(self._url, data=data, headers=headers, timeout=clock) as response:
                raw = await response.read()
        except TimeoutError as error:
            raise EngineUnavailable(f"{self._url} did not answer within {timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self._url}: {error or type(error).__name__}") from error
        if response.status != 200:
            answered = f"{self._url} answered {response.status}: {raw[:500].decode(errors='replace')}"
            if response.status not in PASSING:
                raise EngineError(answered)
            raise EngineUnavailable(answered, retry_after(response.headers))
        return raw

    def _read(self, raw: bytes) -> AssistantMessage:
        try:
            choice = orjson.loads(raw)["choices"][0]
            message = Message.from_openai({**choice["message"], "role": "assistant"})
        except (orjson.JSONDecodeError, LookupError, TypeError, EnvError) as error:
            raise EngineError(f"{self._url} did not answer with a chat completion ({error!r}): {raw[:200]!r}") from error
        reason = "length" if choice.get("finish_reason") == "length" else "stop"
        return AssistantMessage(content=message.content, tool_calls=message.tool_calls, finish_reason=reason)


def wire(message: Message) -> dict[str, Any]:
    """A message with the bytes of its media in it, in the forms of the OpenAI API."""

    def url(part: Media) -> str:
        return f"data:{part.ref.mime};base64,{base64.b64encode(part.bytes()).decode()}"

    out = message.to_openai(url)
    sounds = {url(part): part for part in message.media if isinstance(part, Audio) and part.ref.mime in FORMATS}
    if sounds:
        out["content"] = [_sound(part, sounds) for part in out["content"]]
    return out


def _sound(part: dict[str, Any], sounds: Mapping[str, Audio]) -> dict[str, Any]:
    known = sounds.get(part["audio_url"]["url"]) if part["type"] == "audio_url" else None
    if known is None:
        return part
    data = base64.b64encode(known.bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": FORMATS[known.ref.mime]}}


def parameters(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling in the words of the OpenAI API.

    Raises:
        ConfigError: it has none for a setting.
    """
    unknown = {"top_k": sampling.top_k != -1, "stop_token_ids": sampling.stop_token_ids, "ignore_eos": sampling.ignore_eos}
    asked = [name for name, wanted in unknown.items() if wanted]
    if asked:
        raise ConfigError(
            f"sampling.{asked[0]} = {getattr(sampling, asked[0])!r}: the OpenAI API has no word for it; leave it out"
        )
    out: dict[str, Any] = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
    if sampling.top_p < 1:
        out["top_p"] = sampling.top_p
    if sampling.stop:
        out["stop"] = list(sampling.stop)
    if sampling.sampling_seed is not None:
        out["seed"] = sampling.sampling_seed
    return out
