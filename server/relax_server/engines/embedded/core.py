"""The nouns of the engine: prompts, sequences and what became of them."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relax_sdk.errors import EngineError
from relax_server.engines.embedded.sampling import Sampling
from relax_server.models.media_features import MediaFeatures


class RequestError(EngineError):
    """A request that cannot be served; `status` is the HTTP status it is answered with."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class PromptMedia:
    """One media item of a prompt."""

    key: int
    """Negative; made of kind and sha256, and the prefix key of its tokens."""
    start: int
    """First token."""
    rows: np.ndarray
    """int64 [n], row of its embeddings that each of its tokens has; -1: it is text that belongs to the item."""
    features: MediaFeatures

    @property
    def stop(self) -> int:
        return self.start + len(self.rows)


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for the model; shared by identical requests."""

    ids: list[int]
    """Placeholders expanded."""
    tokens: np.ndarray
    """`ids` as int64 [n]."""
    keys: np.ndarray
    """int64 [n]: `ids`, with each token of a media item replaced by its key."""
    digest: bytes
    """Digest of `keys`."""
    positions: np.ndarray | None
    """float32 [3, n], or None where they are 0, 1, 2, …"""
    offset: float
    """Position of a response token minus its index in the sequence."""
    media: tuple[PromptMedia, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass
class Finish:
    """Why a sequence ended."""

    type: str
    """`stop`, `length` or `abort`."""
    matched: int | str | None = None
    """`stop`: the token id or string."""
    message: str = ""
    """`abort`: the cause."""
    status: int = 200
    """`abort`: HTTP status; 200 when somebody asked for it."""


@dataclass(eq=False)
class Sequence:
    """One response in the making; changed only by the model thread. Lists grow, so a reader may use what it was told of."""

    rid: str
    index: int
    """Among the `n` responses of its request."""
    prompt: Prompt
    sampling: Sampling
    seed: int
    notify: Callable[[Sequence], None]
    """Called on the model thread's event queue after each new token if `stream`, and at the end."""
    stream: bool = False
    out_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    """Weight version per response token."""
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    finish: Finish | None = None
    n_retractions: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the cache when it was first admitted."""
    routed_experts: np.ndarray | None = None
    """int32 [tokens - 1, layers, top_k], once finished."""
    want_routes: bool = False
    arrival: int = 0
    row: int = -1
    """Row of the slot table while running."""
    computed: int = 0
    """Tokens whose keys and values are in the pool."""
    held: int = 0
    """Tokens that have a slot."""
    epoch: int = -1
    """Cache epoch in which its first token was computed; other epochs' keys and values are not shared."""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.out_ids)

    @property
    def max_tokens(self) -> int:
        return len(self.prompt) + self.sampling.max_new_tokens


@dataclass
class Stats:
    """Counters since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed."""
    cached_tokens: int = 0
    """Prompt tokens served from the cache."""
    new_tokens: int = 0
    retractions: int = 0
    aborted: int = 0
    failed: int = 0
    media_embedded: int = 0
    weight_updates: int = 0
    forward_seconds: float = 0.0
    step_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def new_seed() -> int:
    """63 random bits."""
    return secrets.randbits(63)
