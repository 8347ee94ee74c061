"""Lets Megatron-Core 0.16.1 train on CPU with gloo; does nothing where CUDA exists.

Megatron names CUDA in many places (device literals, streams, the RNG, `tensor.type()` tests). `install()` answers these
calls on the CPU instead. It changes torch for the whole process, so it belongs into a process of its own; `parallel.initialize`
calls it, before anything of Megatron is used. Nothing is patched by an import, and it does not matter what was imported before.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

_NOT_HERE = "full scope is deprecated"
"""A warning about CUDA graphs, which says nothing on a CPU."""
_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like", "arange")
_installed = False


class _NullStream:
    """A CUDA stream or event on a device where everything already happens in order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _NullStream]:
        return lambda *args, **kwargs: self


def install() -> bool:
    """Patch torch and Megatron, once.

    Returns:
        Whether the patches are in force; False where CUDA is available.
    """
    global _installed
    if torch.cuda.is_available():
        return False
    if not _installed:
        warnings.filterwarnings("ignore", message=_NOT_HERE)
        _patch_devices()
        _patch_streams()
        _patch_tensor_type()
        _patch_rng()
        _patch_moe()
        _installed = True
    return True


def _patch_devices() -> None:
    # The set of factories that `torch.device("meta")` redirects is computed once, from the attributes of torch. Filled
    # after they are wrapped it would hold the wrappers only, and transformers' `from_pretrained`, which builds on the meta
    # device, would leave non-persistent buffers (inverse rotary frequencies, audio positions) uninitialised.
    from torch.utils._device import _device_constructors

    _device_constructors()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args, **kwargs: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory that takes `device="cuda"` for the CPU and ignores `pin_memory`."""

    @functools.wraps(factory)
    def wrapped(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if device is None:
            return factory(*args, **kwargs)
        is_cuda = torch.device(device).type == "cuda"
        return factory(*args, device="cpu" if is_cuda else device, **kwargs)

    return wrapped


def _patch_streams() -> None:
    cuda: Any = torch.cuda
    null = _NullStream()
    cuda.Stream = cuda.Event = _NullStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: null
    cuda.stream = lambda stream: contextlib.nullcontext()


def _patch_tensor_type() -> None:
    """Optimizers pick parameters by `param.type() == "torch.cuda.FloatTensor"`."""
    original = torch.Tensor.type

    def tensor_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(result, str) and "cuda" not in result:
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    torch.Tensor.type = tensor_type  # type: ignore[method-assign]


def _patch_rng() -> None:
    """The "CUDA" generator is the CPU generator."""
    cuda: Any = torch.cuda

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    cuda.get_rng_state = cuda.random.get_rng_state = get_state
    cuda.manual_seed = torch.manual_seed
    import megatron.core.tensor_parallel.random as megatron_random

    module: Any = megatron_random
    module._get_cuda_rng_state = get_state
    module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger(module.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _patch_moe() -> None:
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    # Split sizes of the all-to-all become host lists only where they are CUDA tensors.
    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host
