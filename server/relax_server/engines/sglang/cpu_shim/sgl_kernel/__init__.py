"""Takes the place of SGLang's kernel library, of which there is no CPU build to install.

On CPUs SGLang imports `*_cpu` functions without asking, and some of its models name operators of the library while they are
imported. Those that serving needs have a torch form that SGLang falls back to, but for one, the hash that seeded sampling draws
from, which is here. The rest raise when they are called.
"""

import torch

__version__ = "0.0.0"

NAMED_AT_IMPORT = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Operators that are looked up, and not called, when the modules of Qwen-VL are imported."""

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in NAMED_AT_IMPORT:
    _library.define(f"{_name}(Tensor x) -> Tensor")

MASK = 0xFFFFFFFF
"""Values are 32-bit numbers in int64 tensors."""


def _rotate(x, bits):
    return ((x << bits) | (x >> (32 - bits))) & MASK


def _mix(h, k):
    k = (_rotate((k * 0xCC9E2D51) & MASK, 15) * 0x1B873593) & MASK
    return (_rotate(h ^ k, 13) * 5 + 0xE6546B64) & MASK


def murmur_hash32(seed, positions, columns):
    """MurmurHash3 (32 bits) of seed, position and column: the same numbers as SGLang's kernel for GPUs gives.

    Args:
        seed: [n], 64 bits each; positions: [n]; columns: [m].

    Returns:
        uint32 [n, m].
    """
    seed = seed.view(torch.int64) if seed.dtype == torch.uint64 else seed.to(torch.int64)
    h = _mix(torch.zeros_like(seed), seed & MASK)
    h = _mix(h, (seed >> 32) & MASK)
    h = _mix(h, positions.to(torch.int64) & MASK)
    h = _mix(h[:, None], columns.to(torch.int64)[None] & MASK) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & MASK
    return (h ^ (h >> 16)).to(torch.uint32)


_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(f"this stand-in for sgl_kernel has no {name}")

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs the CPU build of sgl_kernel")

    return absent
