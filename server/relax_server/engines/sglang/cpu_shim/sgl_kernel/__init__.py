"""Takes the place of SGLang's kernel library, of which there is no CPU build to install.

On CPUs SGLang imports `*_cpu` functions without asking, and some of its models name operators of the library while they are
imported. Those that serving needs have a torch form that SGLang falls back to. The rest raise when they are called.
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


def __getattr__(name):
    if not name.endswith("_cpu"):
        raise AttributeError(f"this stand-in for sgl_kernel has no {name}")

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs the CPU build of sgl_kernel")

    return absent
