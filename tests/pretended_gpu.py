"""A pretended GPU: tensors that say they are on `cuda:0` and are computed on the CPU.

It shows whether every tensor is put on the device: an operation on tensors of two devices is refused, as a GPU refuses it,
and so is `numpy()` of a tensor that is not on the CPU. It says nothing about a GPU's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU = torch.device("cuda", 0)
BETWEEN = ("aten._to_copy", "aten.to.", "aten.copy_", "aten.index.Tensor", "aten.index_put")
"""Operations that may take tensors of two devices: a GPU takes indices on the CPU, too."""


class Pretended(torch.Tensor):
    """A tensor on the pretended GPU."""

    held: torch.Tensor
    """On the CPU."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Pretended:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("meta"),  # what PyTorch's own code sees
        )
        made.held = held
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """What Python sees."""
        return GPU

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:  # in parts it would make masks of its own on "meta"
            return _compute(func, args, kwargs or {})
        if func is torch.Tensor.__index__:
            return int(args[0].held)
        with torch._C.DisableTorchFunctionSubclass():  # or results on the CPU would be made of this class, too
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Pretending(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = tree_flatten((args, kwargs))[0]
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    devices = [x for x in given if isinstance(x, torch.device)]
    on_gpu = any(isinstance(x, Pretended) for x in tensors)
    if devices and not (on_gpu and devices[0].type == "meta"):  # "meta" is how PyTorch's own code sees the GPU
        on_gpu = devices[0].type == "cuda"
    name = str(func)
    mixed = {isinstance(x, Pretended) for x in tensors if x.dim()}
    if len(mixed) > 1 and not name.startswith(BETWEEN):
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    args_, kwargs_ = tree_map(_on_cpu, (args, kwargs))
    if name.startswith("aten.histc") and not args_[0].is_floating_point():  # a CPU has it for floats alone
        args_ = (args_[0].float(), *args_[1:])
    out = func(*args_, **kwargs_)
    if func is not F.scaled_dot_product_attention and func._schema.is_mutable:
        return kwargs["out"] if "out" in kwargs else args[0]
    return tree_map(lambda x: Pretended(x) if isinstance(x, torch.Tensor) else x, out) if on_gpu else out


def _on_cpu(x: Any) -> Any:
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return x.held if isinstance(x, Pretended) else x


@contextmanager
def pretended_gpu() -> Iterator[torch.device]:
    """Lets tensors be made on, and moved to, a device that there is not."""
    inner: Any = torch._C
    # As with PyTorch's own fake tensors a list becomes a tensor on the CPU first, and is then moved.
    lifted, overwritten = inner._only_lift_cpu_tensors(), torch.__future__.get_overwrite_module_params_on_conversion()
    inner._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    to_list, item = torch.Tensor.tolist, torch.Tensor.item
    by_copy = mock.patch.multiple(torch.Tensor, tolist=lambda self: to_list(self.cpu()), item=lambda self: item(self.cpu()))
    quiet = mock.patch.object(torch.cuda, "_lazy_init", lambda: None)
    old = mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (7, 0))  # has no kernels of its own
    with quiet, old, by_copy, _Pretending():
        try:
            yield GPU
        finally:
            inner._set_only_lift_cpu_tensors(lifted)
            torch.__future__.set_overwrite_module_params_on_conversion(overwritten)
