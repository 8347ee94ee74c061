"""Configuration of what is learnt and how: the algorithm, the optimizer and the learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from relax_sdk.field_checks import check_types, require

ALGORITHMS: dict[str, tuple[str, ...]] = {
    "advantage": ("dr_grpo", "grpo", "rloo"),
    "policy_loss": ("clip",),
    "correction": ("none", "tis"),
    "kl_estimator": ("k2", "k3"),
    "aggregation": ("sample_mean", "token_mean"),
}
"""Fields of `AlgorithmConfig` that name a function, with the names that ship; others are named `package.module:function`."""


def _is_import(text: str) -> bool:
    """Whether it has the form `package.module:function`."""
    module, _, function = text.partition(":")
    return function.isidentifier() and all(part.isidentifier() for part in module.split("."))


@dataclass(frozen=True)
class AlgorithmConfig:
    """GRPO and its relatives; formulas and sources are in `relax_server.training.algorithms`.

    The fields of `ALGORITHMS` take a name that ships, or a function of yours as `package.module:function`, which the trainer
    imports; `relax_server.training.algorithms.KINDS` says what it takes and returns.
    """

    advantage: str = "grpo"
    """`grpo`, `dr_grpo` or `rloo`."""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """`trajectory`: every token gets the episode's advantage.
    `turn`: reward from this turn on, compared at the same turn within the group."""
    gamma: float = 1.0
    """Discount of later turns' rewards with `credit="turn"`; 0 where a turn's answer does not bear on later ones."""
    clip_low: float = 0.2
    clip_high: float = 0.28
    """DAPO clip-higher."""
    dual_clip: float = 3.0
    """Bounds the loss of a token with a negative advantage at this times the advantage's size, however large the ratio."""
    policy_loss: str = "clip"
    """`clip`: the clipped surrogate of PPO with the three bounds above."""
    aggregation: str = "token_mean"
    """`token_mean`: every token of an update counts the same. `sample_mean`: every sample counts the same."""
    entropy_coef: float = 0.0
    """0.01 where `Trainer` trains a model from random weights."""
    kl_coef: float = 0.0
    """Weight of the KL divergence from the weights that reinforcement learning began with: the model, or what the format
    warm-up made of it. 0 keeps no reference."""
    kl_estimator: str = "k3"
    """How the KL divergence enters the loss. `k3`, as in GRPO: its gradient is that of KL(reference || policy), which brings
    back what has become unlikely. `k2`: that of KL(policy || reference), of lower variance; it lets go what is not sampled.
    Tokens of an older policy are weighed by `correction`."""
    old_logprobs: Literal["recompute", "engine"] = "engine"
    """`engine`: the ratio is against what was sampled.
    `recompute`: against the trainer's own logprobs before the update; `correction` then weighs the token. In the first
    update on a batch this ratio is 1, so `clip_low` and `clip_high` act from the second one on."""
    correction: str = "tis"
    """Weight of a token that another policy has sampled. `tis`: the importance ratio, at most `tis_clip`. `none`: 1."""
    tis_clip: float = 2.0
    """The largest weight of `tis`."""
    updates_per_batch: int = 1
    """Optimizer steps taken on each batch; the batch is split by groups."""

    def __post_init__(self) -> None:
        check_types(self)
        require(0 <= self.gamma <= 1, self, "gamma", "0 to 1")
        require(0 < self.clip_low < 1, self, "clip_low", "between 0 and 1")
        require(self.clip_high > 0, self, "clip_high", "above 0")
        require(self.dual_clip > 1, self, "dual_clip", "above 1")
        require(self.entropy_coef >= 0, self, "entropy_coef", "0 or more")
        require(self.kl_coef >= 0, self, "kl_coef", "0 or more")
        require(self.tis_clip > 0, self, "tis_clip", "above 0 (correction='none' turns it off)")
        require(self.updates_per_batch >= 1, self, "updates_per_batch", "1 or more")
        for name, known in ALGORITHMS.items():
            named = getattr(self, name)
            require(named in known or _is_import(named), self, name, f"{', '.join(known)}, or 'package.module:function'")


@dataclass(frozen=True)
class OptimizerConfig:
    """Megatron's AdamW and the learning-rate schedule.

    The rate rises to `lr` over the warm-up and decays after it. On `fit(resume=True)` another number of steps lets the rate
    go on from where it is, towards the new end; another `lr` is the new peak, to which it rises from where it is over
    `warmup_steps`, or falls at once. `warmup_steps`, `decay`, `min_lr_ratio` and `clip_grad` may change as well; the others
    belong to AdamW's moments and may not.
    """

    lr: float = 1e-6
    """Suits full fine-tuning of a pretrained model; 5e-4 where `Trainer` trains a model from random weights."""
    warmup_steps: int = 20
    """Steps until `lr` is reached, but at most a quarter of the run."""
    decay: Literal["linear", "constant"] = "linear"
    """`linear`: from `lr` after the warm-up to `min_lr_ratio` of it at the last step."""
    min_lr_ratio: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0

    def __post_init__(self) -> None:
        check_types(self)
        require(self.lr > 0, self, "lr", "above 0")
        require(self.warmup_steps >= 0, self, "warmup_steps", "0 or more")
        require(0 <= self.min_lr_ratio <= 1, self, "min_lr_ratio", "0 to 1")
        require(0 <= self.beta1 < 1, self, "beta1", "0 or more, below 1")
        require(0 <= self.beta2 < 1, self, "beta2", "0 or more, below 1")
        require(self.eps > 0, self, "eps", "above 0")
        require(self.weight_decay >= 0, self, "weight_decay", "0 or more")
        require(self.clip_grad > 0, self, "clip_grad", "above 0")
