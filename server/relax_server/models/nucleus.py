"""Which tokens top-k and top-p leave to be sampled: the embedded engine and the trainer read the same rule."""

from __future__ import annotations

import torch
from torch import Tensor


def kept(probs: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The `top_k` most likely tokens, and of these the smallest set whose share of their mass reaches `top_p`.

    Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv 1904.09751, section 3.1, after a cut to k.

    Args:
        probs: float [rows, vocabulary].
        top_k: int64 [rows, 1]; the size of the vocabulary or more keeps all.
        top_p: float [rows, 1], above 0, at most 1.

    Returns:
        bool [rows, vocabulary]; the most likely token is always kept.
    """
    values, order = probs.sort(-1, descending=True)
    values = values.masked_fill(torch.arange(probs.shape[1], device=probs.device) >= top_k, 0)
    before = values.cumsum(-1) - values
    inside = (values > 0) & ((before < top_p * values.sum(-1, keepdim=True)) | (top_p >= 1))
    inside[:, 0] = True
    return torch.zeros_like(inside).scatter_(1, order, inside)
