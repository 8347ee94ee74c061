"""Weights for SGLang as handles of shared memory, without a file."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing as multiprocessing


@contextmanager
def payloads(tensors: Mapping[str, torch.Tensor], ranks: int) -> Iterator[list[str]]:
    """What `/update_weights_from_tensor` takes, good until the block ends.

    The tensors are copied into files of shared memory, and their names are sent. torch's other way, by file descriptor, has
    the receiver ask for this process's authentication key; SGLang does not have it, and ends. It ends, too, if a payload is
    sent a second time.

    Args:
        tensors: by the names of the model's folder.
        ranks: of the server; each takes a payload of its own.

    Yields:
        One base64 pickle of handles for each rank.
    """
    before = multiprocessing.get_sharing_strategy()
    multiprocessing.set_sharing_strategy("file_system")
    try:
        copies = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in tensors.items()]
        yield [_pickled(copies) for _ in range(ranks)]
    finally:
        multiprocessing.set_sharing_strategy(before)


def _pickled(tensors: list[tuple[str, torch.Tensor]]) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(tensors)
    return base64.b64encode(buffer.getvalue()).decode()
