"""Configuration of the trainer process: what it computes at once, in which precision, and when it writes checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relax_sdk.field_checks import check_types, require

Attention = Literal["auto", "blocks", "flex"]
Offload = Literal["auto", "none", "optimizer", "all"]
Experts = Literal["auto", "sequential", "grouped"]
Recompute = bool | Literal["selective"]


@dataclass(frozen=True)
class TrainingConfig:
    """The trainer process."""

    token_budget: int = 8192
    """Tokens of a packed forest; a larger batch is split into several, their gradients summed."""
    share_prompts: bool = True
    """Compute shared prefixes of a group once."""
    replay_routes: bool = False
    """R3 (arXiv 2510.11370): send each token to the experts that the engine chose for it; for mixtures of experts only. The
    frozen reference of `kl_coef` takes routes of its own."""
    recompute: Recompute = False
    """What is computed again for the backward pass instead of being kept. `selective`: attention between its projections
    (arXiv 2205.05198), which takes most of the memory of long samples and little of the time. True: whole layers, those
    of media towers included, of which the inputs alone are kept."""
    attention: Attention = "auto"
    """How packed samples attend: in dense blocks, or by FlexAttention, which needs an NVIDIA GPU and heads of 16 channels or
    more. `auto` takes FlexAttention where it can, in bfloat16; in float32 blocks are faster."""
    experts: Experts = "auto"
    """How the experts of a mixture are computed: one after the other, or all in one grouped matrix product. `auto`: grouped on
    an NVIDIA GPU in bfloat16, else one after the other."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    offload: Offload = "auto"
    """What is in the machine's memory while the device has no use for it. `optimizer`: masters and moments, but for the update
    itself. `all`: the trainer's whole state while engines generate, with `mode="colocate"` only. `auto`: `all` in that mode on
    a GPU, else `none`."""
    checkpoint_every: int = 50
    """Steps; the last step is always saved."""
    keep_checkpoints: int = 2
    async_checkpoints: bool = True
    """Write a checkpoint while training goes on, from a copy in the machine's memory: weights and optimizer once more."""
    threads: int = 1
    step_timeout: float = 900.0
    """Seconds for one training step, for publishing its weights and for a checkpoint; a trainer that takes longer is taken for
    one that hangs, and started again at its last checkpoint."""
    record_tokens: bool = True
    """Keep in the journal what each step computed for each trained token, to be looked at: its logprob, entropy, advantage."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self.token_budget >= 64, self, "token_budget", "64 or more")
        require(self.checkpoint_every >= 1, self, "checkpoint_every", "1 or more")
        require(self.keep_checkpoints >= 1, self, "keep_checkpoints", "1 or more")
        require(self.threads >= 1, self, "threads", "1 or more")
        require(self.step_timeout > 0, self, "step_timeout", "above 0 seconds")
