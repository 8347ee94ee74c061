"""Lets SGLang 0.5.23 start where torch is a CPU build; on PYTHONPATH of its process only. No arithmetic is replaced.

The torchvision on offer is a CUDA build whose operators cannot be loaded beside it, and its Python part stops at
registering fakes for them. They are declared, without an implementation, just before it is imported.
"""

import importlib.abc
import sys


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; is only told that torchvision is about to be imported."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            global _library  # the declarations live as long as it does
            _library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                _library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _DeclareOperators())
