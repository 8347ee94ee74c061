"""How token losses become one number: what each token counts, relative to the mean over all tokens of an update."""

from __future__ import annotations

import torch
from torch import Tensor

from relax_server.training.algorithms.registry import register


@register("aggregation", "token_mean")
def token_mean(sample: Tensor) -> Tensor:
    """w_t = 1: the mean over all tokens of the update, so that long responses count as much per token as short ones.

    Yu et al., "DAPO", arXiv 2503.14476, section 3.3.

    Args:
        sample: int64 [n], the sample that each trained token belongs to, over the global batch of one update.

    Returns:
        float32 [n].
    """
    return torch.ones(len(sample))


@register("aggregation", "sample_mean")
def sample_mean(sample: Tensor) -> Tensor:
    """w_t = n / (samples * tokens of t's sample): the mean over samples of the mean over each one's tokens.

    As in the objective of GRPO: Shao et al., "DeepSeekMath", arXiv 2402.03300, equation 3.

    Args:
        sample: int64 [n], as for `token_mean`.

    Returns:
        float32 [n], of mean 1.
    """
    _, where, counts = torch.unique(sample, return_inverse=True, return_counts=True)
    return (len(sample) / (len(counts) * counts[where])).float()
