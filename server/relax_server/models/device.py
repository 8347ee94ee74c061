"""The device that a process computes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def this_device(dtype: torch.dtype) -> torch.device:
    """The first GPU that this process sees (`CUDA_VISIBLE_DEVICES`), else the CPU.

    On a GPU convolutions in float32 are computed in TF32 unless they are told not to, which is 1,000 times less exact than
    float32 itself, so that engine and trainer would differ by it. They are told so here.

    Args:
        dtype: of the model.
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    if dtype == torch.float32:
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
    return torch.device("cuda", torch.cuda.current_device())


def gpu_missed() -> str:
    """What a user is to be told where torch is a build for NVIDIA GPUs and finds none, which makes all slow; else empty."""
    import torch

    build = torch.version.cuda
    if build is None or torch.cuda.is_available():
        return ""
    return (
        f"torch {torch.__version__} is a build for CUDA {build} and finds no GPU here, so that the model computes on the CPU, "
        "which is slow. If this machine has a GPU, `nvidia-smi` says whether its driver works; CUDA_VISIBLE_DEVICES may hide it"
    )
