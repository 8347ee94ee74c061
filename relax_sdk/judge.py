"""`Judge`: a reward that asks a language model how good a finished episode is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from relax_sdk.errors import ConfigError, RewardError
from relax_sdk.retrying import PASSING, retry_after, retrying
from relax_sdk.trajectory import Trajectory

if TYPE_CHECKING:
    import httpx

PROMPT = """Here is a conversation.

{transcript}

How well did the assistant do? Answer with one number from {low} (worst) to {high} (best) and nothing else."""

_NUMBER = r"[-+]?\d+(?:\.\d+)?"


@dataclass(frozen=True)
class Judge:
    """An async reward function for a `Rubric`: one question to any OpenAI-compatible chat model, one number back.

    The number, from `scale`, is mapped to 0 … 1. Network errors, time-outs and passing HTTP errors are tried again with
    exponential back-off and jitter (a `Retry-After` header is heeded); an answer without a clear number is an error, never a
    guess.

        rubric = Rubric([Judge("http://localhost:8000/v1", "qwen3", "Is this polite, {low} to {high}? {transcript}")])
    """

    base_url: str
    """Address of the API, usually ending in `/v1`."""
    model: str
    prompt: str | Callable[[Trajectory], str] = PROMPT
    """The question: a template with `{transcript}`, `{low}` and `{high}`, or a function of the trajectory."""
    scale: tuple[float, float] = (0.0, 10.0)
    """The worst and the best number the model may answer."""
    name: str = "judge"
    """The component's name in `Trajectory.rewards`; two judges of one rubric need two names."""
    api_key: str | None = field(default=None, repr=False)
    temperature: float = 0.0
    max_tokens: int = 64
    timeout: float = 30.0
    """Seconds for one attempt."""
    attempts: int = 4
    backoff: float = 0.5
    """Seconds before the second attempt; doubled before each further one, at most 10."""
    parse: Callable[[str], float] | None = None
    """Reads the number out of the answer in place of `parse_score`."""
    system: str | None = None
    """A system message, if any."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request, for what a server offers beyond the OpenAI API."""

    def __post_init__(self) -> None:
        low, high = self.scale
        for ok, name, allowed in (
            (low < high, "scale", "(worst, best) with worst below best"),
            (self.timeout > 0, "timeout", "above 0 seconds"),
            (self.attempts >= 1, "attempts", "1 or more"),
            (self.backoff >= 0, "backoff", "0 seconds or more"),
            (self.base_url.startswith(("http://", "https://")), "base_url", "an http:// or https:// URL"),
            (bool(self.name), "name", "a word"),
        ):
            if not ok:
                raise ConfigError(f"Judge.{name} = {getattr(self, name)!r}; allowed: {allowed}")

    @property
    def __name__(self) -> str:
        return self.name

    async def __call__(self, trajectory: Trajectory) -> float:
        """The judgement, from 0 (worst) to 1 (best).

        Raises:
            RewardError: no answer after all attempts, a refusal by the server, or an answer that is not a number in `scale`.
        """
        low, high = self.scale
        if callable(self.prompt):
            question = self.prompt(trajectory)
        else:
            # Not str.format: prompts and transcripts are full of braces.
            values = {"{low}": f"{low:g}", "{high}": f"{high:g}", "{transcript}": transcript(trajectory)}
            question = re.sub(r"\{(?:low|high|transcript)\}", lambda match: values[match[0]], self.prompt)
        answer = await self._ask(question)
        try:
            number = (self.parse or parse_score)(answer)
        except ValueError as error:
            raise RewardError(f"{self.name}: {self.model} answered {answer[:120]!r}: {error}") from error
        if not low <= number <= high:
            raise RewardError(f"{self.name}: {self.model} answered {number:g}, not from {low:g} to {high:g}")
        return (number - low) / (high - low)

    async def _ask(self, question: str) -> str:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*messages, {"role": "user", "content": question}],
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            **self.extra_body,
        }
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        url = self.base_url.rstrip("/") + "/chat/completions"
        try:
            response = await retrying(_Passing, self.backoff, attempts=self.attempts)(self._post, url, headers, body)
        except _Passing as error:
            raise RewardError(f"{self.name}: no answer from {url} in {self.attempts} attempts; last: {error}") from error
        return _content(self, response)

    async def _post(self, url: str, headers: dict[str, str], body: dict[str, Any]) -> httpx.Response:
        """One try.

        Raises:
            _Passing: no answer in time, or an error that may pass.
            RewardError: a refusal.
        """
        import httpx

        try:
            async with asyncio.timeout(self.timeout):  # httpx limits each read, not the whole
                response = await (await _client()).post(url, json=body, headers=headers, timeout=self.timeout)
        except (httpx.TransportError, TimeoutError) as error:
            raise _Passing(f"{type(error).__name__} {error}".strip()) from error
        if response.is_success:
            return response
        problem = f"HTTP {response.status_code}: {response.text[:200]}"
        if response.status_code not in PASSING:
            raise RewardError(f"{self.name}: {url} refused: {problem}")
        raise _Passing(problem, retry_after(response.headers))


class _Passing(Exception):
    """A try that failed, and may succeed later."""

    def __init__(self, problem: str, retry_after: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after = retry_after


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, AsyncGenerator[None]]] = WeakKeyDictionary()


async def _client() -> httpx.AsyncClient:
    """The client of all judges in this event loop: making one reads the certificates, and connections are kept.

    It is closed with the loop: `asyncio.run`, which ends every run, ends the loop's asynchronous generators.
    """
    import httpx

    loop = asyncio.get_running_loop()
    if loop not in _clients:
        client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=64))
        held = _held(client)
        _clients[loop] = client, held
        await anext(held)
    return _clients[loop][0]


async def _held(client: httpx.AsyncClient) -> AsyncGenerator[None]:
    """Closes a client when it is ended."""
    async with client:
        yield


def transcript(trajectory: Trajectory) -> str:
    """A trajectory's messages as text, one paragraph a message; media as `[image]`, `[audio]`, `[video]`."""
    paragraphs = []
    for message in trajectory.messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(p["text"] if p["type"] == "text" else f"[{p['type'].removesuffix('_url')}]" for p in content)
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        content += "".join(f"[calls {call['name']}({call['arguments']})]" for call in calls)
        paragraphs.append(f"{message['role']}: {content}")
    return "\n\n".join(paragraphs)


def parse_score(answer: str) -> float:
    """The number in a judge's answer: `7`, `7/10`, `Score: 7`, or the only number there is.

    Raises:
        ValueError: no number, or several and none marked as the score.
    """
    marked = re.findall(rf"(?i)\b(?:score|rating|grade|answer)\b\W{{0,5}}?({_NUMBER})", answer)
    if marked:
        return float(marked[-1])
    numbers = re.findall(rf"(?<![\w.])({_NUMBER})(?:\s*/\s*{_NUMBER})?(?![\w])", answer)
    if len(numbers) != 1:
        raise ValueError("it holds no number" if not numbers else f"it holds {len(numbers)} numbers, none marked as the score")
    return float(numbers[0])


def _content(judge: Judge, response: httpx.Response) -> str:
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise RewardError(f"{judge.name}: {response.url} answered no chat completion: {response.text[:200]}") from error
    if not isinstance(content, str) or not content.strip():
        raise RewardError(f"{judge.name}: {judge.model} answered nothing")
    return content
