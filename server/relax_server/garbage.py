"""Python's garbage collector in processes that hold a large library for ever and make many small objects."""

from __future__ import annotations

import gc

YOUNG = 20_000
"""New objects between two looks at the youngest ones; Python's 700 are made by one episode."""


def settle() -> None:
    """Leave everything that is there by now out of later collections; to be called once a process has started.

    A full collection walks all objects of torch and transformers, which takes 0.3 s, and happens where many objects are made:
    in the middle of a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
