"""Lets SGLang 0.5.23 start where torch is a CPU build; on PYTHONPATH of its process only. No arithmetic is replaced."""

import importlib.abc
import sys


class _Before(importlib.abc.MetaPathFinder):
    """Finds nothing; is only told that a module is about to be imported, once."""

    def __init__(self, name, action):
        self.name, self.action = name, action

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.name:
            sys.meta_path.remove(self)
            self.action()
        return None


def _declare_operators():
    """The torchvision on offer is a CUDA build whose operators cannot be loaded beside a CPU torch.

    Its Python part stops at registering fakes for them, so they are declared, without an implementation.
    """
    import torch

    global _library  # the declarations live as long as it does
    _library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        _library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _pin_nothing():
    """Routed experts are kept in memory that is pinned for CUDA; without CUDA there is nothing to pin."""
    import sglang.srt.mem_cache.pool_host.common as common

    common._cuda_host_register = lambda *args, **kwargs: None


sys.meta_path.insert(0, _Before("torchvision", _declare_operators))
sys.meta_path.insert(0, _Before("sglang.srt.state_capturer.base", _pin_nothing))
