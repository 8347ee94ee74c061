"""How far engine and trainer are apart on what was answered with the trainer's own weights, by the media that it was about."""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_server.training.step_tokens import TEXT, StepTokens


def fresh_gaps(tokens: StepTokens, version: int) -> dict[str, Any]:
    """The gap of fresh turns: those of whose tokens none is of other weights than those that the step began with.

    Of older weights the gap is mostly what was learnt since. A turn that goes on over an update has a prompt that was read with
    the older weights, so its later tokens do not count either.

    Args:
        tokens: of the step.
        version: of the weights that it began with.

    Returns:
        `logprob_gap_fresh`: by modality (`audio`, `image`, `video`; `text` for samples without media), the mean absolute
        difference of logprobs in nats. `fresh_tokens`: by modality, the tokens that it is of. Without those that have none.
    """
    gaps: dict[str, list[np.ndarray]] = {}
    for sample, gap in zip(tokens.collected.samples, tokens.by_sample(tokens.gap), strict=True):
        answered = np.asarray(sample.loss_mask, bool)
        turns, versions = np.asarray(sample.turn)[answered], np.asarray(sample.versions)[answered]
        fresh = gap[~np.isin(turns, turns[versions != version]) & np.isfinite(gap)]
        for kind in {ref.kind for ref in sample.media} or {TEXT} if len(fresh) else ():
            gaps.setdefault(kind, []).append(fresh)
    known = {kind: np.concatenate(parts) for kind, parts in sorted(gaps.items())}
    return {
        "logprob_gap_fresh": {kind: float(values.mean()) for kind, values in known.items()},
        "fresh_tokens": {kind: len(values) for kind, values in known.items()},
    }
