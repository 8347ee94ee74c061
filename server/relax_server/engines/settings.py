"""`EngineSettings`: how the process of an engine is started, whatever its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relax_server.guard import new_token


@dataclass(frozen=True)
class EngineSettings:
    """What an engine's process is started with, besides its model and its log; a kind leaves out what it has no use for."""

    media_root: str | Path | None = None
    """The only folder media paths may point into; None: SGLang takes data URIs only. vLLM serves text."""
    threads: int = 1
    """Threads of the model, on a CPU."""
    dtype: str = "float32"
    """`float32` or `bfloat16`."""
    host: str = "127.0.0.1"
    """The address that it listens on."""
    token: str = field(default_factory=new_token, repr=False)
    """What its callers have to show; by default one that nobody can guess."""
    port: int = 0
    """0 picks a free one."""
    max_total_tokens: int | None = None
    """KV slots; None: embedded 1 GiB worth; SGLang and vLLM 65,536 on a CPU, on a GPU what they find room for."""
    max_running: int | None = None
    """Sequences in one batch; None: embedded 512, SGLang and vLLM 256."""
    return_routed_experts: bool = False
    """Record the experts of every token; vLLM refuses it."""
    weight_version: int = 0
    """Version of the weights in the model folder."""
    features: str | Path | None = None
    """Folder in shared memory where media features are exchanged with other processes; None: each for itself."""
    timeline: str | Path | None = None
    """Folder for the spans of the embedded engine; None records none."""
    releases_memory: bool = False
    """`release_memory` is to give it back, which SGLang and vLLM do on a GPU only."""
    python: str | Path | None = None
    """The interpreter of SGLang's or vLLM's environment, or that environment's folder; None looks for it."""
    flags: tuple[str, ...] = ()
    """More flags for the command line of SGLang or vLLM, such as `--tp 2`; they come last and win."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the process's environment."""
