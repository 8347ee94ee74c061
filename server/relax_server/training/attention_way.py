"""Which way a model attends over packed forests: in dense blocks, or by FlexAttention."""

from __future__ import annotations

from typing import Literal

from relax_sdk.errors import ConfigError
from relax_sdk.training_config import Attention

LEAST_HEAD = 16
"""Channels of a head that FlexAttention's kernels need at least."""


def attention_way(setting: Attention, *, on_gpu: bool, head_dim: int, dtype: str) -> Literal["blocks", "flex"]:
    """Choose how a model attends.

    In float32 FlexAttention's kernels do not use the tensor cores, or they would not be exact: on an H200 blocks take 1.4 times
    their time with 1,000 tokens, and a quarter to a third of it with 8,000 (`benchmarks.gpu_check`).

    Args:
        setting: `TrainingConfig.attention`.
        on_gpu: the model is trained on an NVIDIA GPU.
        head_dim: channels of one of its heads.
        dtype: `TrainingConfig.dtype`.

    Raises:
        ConfigError: FlexAttention is asked for and cannot be had.
    """
    if setting == "flex" and not on_gpu:
        raise ConfigError(
            "training.attention = 'flex' needs an NVIDIA GPU, as FlexAttention has no backward pass on a CPU; set it to 'auto' "
            "or 'blocks'"
        )
    if setting == "flex" and head_dim < LEAST_HEAD:
        raise ConfigError(
            f"training.attention = 'flex' needs heads of {LEAST_HEAD} channels or more, and those of this model have "
            f"{head_dim}; set it to 'auto' or 'blocks'"
        )
    if setting == "auto":
        return "flex" if on_gpu and head_dim >= LEAST_HEAD and dtype == "bfloat16" else "blocks"
    return setting
