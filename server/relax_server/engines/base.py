"""The engine interface: the SGLang HTTP contract as dataclasses and one protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from relax_sdk.config import SamplingParams
from relax_sdk.media import MediaRef
from relax_sdk.trajectory import VersionSpan

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True)
class MediaItem:
    """One media item on its way to an engine."""

    ref: MediaRef
    url: str
    """A path inside the engine's media folder, or a `data:` URI."""


@dataclass(frozen=True)
class GenerateRequest:
    """Token ids and media in."""

    input_ids: list[int]
    """Wire form: one placeholder per media item; the engine expands it."""
    sampling: SamplingParams
    media: tuple[MediaItem, ...] = ()
    """Media in the order of the placeholders."""
    n: int = 1
    seeds: tuple[int, ...] = ()
    """One per answer, in place of the one in `sampling`; only for engines that `deals_seeds`."""
    return_routed_experts: bool = False
    rid: str = ""
    """Names the request, so that it can be aborted."""
    alone: bool = False
    """No other request like it is about to come."""


@dataclass
class Generation:
    """Token ids, logprobs and weight versions out."""

    prompt_ids: list[int]
    """What the model saw: placeholders expanded."""
    response_ids: list[int]
    logprobs: list[float]
    """Natural log, one per response token, of the distribution sampled from: after banned tokens, temperature, `top_k` and
    `top_p`. SGLang reports them from before the last two."""
    weight_versions: list[VersionSpan]
    finish_reason: str
    """`stop`, `length` or `abort`."""
    routed_experts: bytes | None = None
    """int32 [len(prompt) + len(response) - 1, layers, top_k] in C order."""
    routed_shape: list[int] | None = None
    cached_tokens: int = 0
    seeded: bool = True
    """Sampled with the seed that was asked for; False where the engine does not take any."""
    meta: dict[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """One inference engine.

    Every method raises `EngineUnavailable` when it cannot be reached or does not answer in time, `EngineError` when it
    refuses or answers wrongly, `EngineAborted` when a generation was aborted from outside.
    """

    url: str
    deals_seeds: bool
    """Whether the answers of one request may have seeds of their own (`GenerateRequest.seeds`)."""

    async def generate(self, request: GenerateRequest, timeout: float) -> list[Generation]:
        """All `n` answers, whole."""
        ...

    def stream(self, request: GenerateRequest, timeout: float) -> AsyncIterator[Generation]:
        """The answer as it grows (cumulative); `n` must be 1."""
        ...

    async def abort(self, rid: str | None) -> None:
        """Abort one request, or all with None."""
        ...

    async def update_weights(self, path: str, version: int, flush_cache: bool = True) -> None:
        """Load HF weights from a folder; tokens generated from then on carry `version`."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating: `abort` ends requests, `retract` drops their cache and continues later, `in_place` keeps all."""
        ...

    async def resume(self) -> None:
        """Go on after `pause`."""
        ...

    async def release_memory(self) -> None:
        """Give back the memory of weights and cache; the engine must be paused and idle."""
        ...

    async def resume_memory(self) -> None:
        """Take the memory again; weights must then be updated before generating."""
        ...

    async def flush_cache(self) -> None:
        """Forget all cached prefixes and media embeddings."""
        ...

    async def health(self, timeout: float = 5.0) -> bool:
        """Whether it answers."""
        ...

    async def server_info(self) -> dict[str, Any]:
        """Settings and load: `running`, `waiting`, `cached_tokens`, `weight_version`, …"""
        ...

    async def model_info(self) -> dict[str, Any]:
        """`model_path`, `weight_version`."""
        ...

    async def close(self) -> None:
        """Close connections; the engine itself goes on."""
        ...
