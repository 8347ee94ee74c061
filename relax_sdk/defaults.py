"""Settings of a run that nobody chose: those that suit a pretrained model, or those that suit random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Sections = dict[str, dict[str, Any]]
"""Fields to change, by section of `RunConfig`."""

FROM_SCRATCH: Sections = {
    "algorithm": {"entropy_coef": 0.0, "kl_coef": 0.03},
    "optimizer": {"lr": 1e-3},
}
"""Settings for a model that starts from random weights: `Trainer(env, **FROM_SCRATCH)`.

A higher learning rate, and in place of an entropy bonus a hold on what the format warm-up taught, which is to be undecided
between contents and sure about the form.
"""

RANDOM_WEIGHTS: Sections = {
    "algorithm": {"entropy_coef": 0.01},
    "optimizer": {"lr": 5e-4},
    "warmup": {"steps": 60},
}
"""What a model from random weights has in place of the configuration's own defaults, which suit a pretrained one."""

ADAPTERS: Sections = {"optimizer": {"lr": 1e-5}}
"""What a trained model has where low-rank adapters are trained in its place: they want about ten times its learning rate
(Schulman and Thinking Machines Lab 2025, LoRA Without Regret)."""

SCRATCH = "from_scratch"
"""The key in an environment's `defaults` of those that suit models from random weights only."""


def from_random_weights(model: str) -> bool:
    """Whether a model is made anew from random weights, so that it must learn everything in the run.

    True for `relax/tiny-omni`, `relax/tiny-qwen3` and `relax/tiny-llama`. A folder counts as trained whatever is in it: at
    the settings for random weights a trained model is destroyed within a few steps, while at those for a trained one a
    random model only learns slowly.
    """
    return model.startswith("relax/tiny-")


def sections_for(model: str, defaults: Mapping[str, Any], adapters: bool = False) -> Sections:
    """The settings of each section that nobody chose, but that differ from the configuration's own defaults.

    Args:
        model: as `RunConfig.model` names it.
        defaults: of the environment (`register(defaults=…)`). What is under `"from_scratch"` counts only for a model from
            random weights.
        adapters: low-rank adapters are trained (`lora.rank`).
    """
    layers: list[Mapping[str, Any]] = [ADAPTERS, defaults] if adapters else [defaults]
    if from_random_weights(model):
        layers = [RANDOM_WEIGHTS, defaults, defaults.get(SCRATCH, {})]
    out: Sections = {}
    for layer in layers:
        for name, values in layer.items():
            if isinstance(values, Mapping) and name != SCRATCH:
                out[name] = out.get(name, {}) | dict(values)
    return out
