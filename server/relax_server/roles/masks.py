"""`relax explain-mask`: the tokens of a recorded episode with their texts, masks and reasons."""

from __future__ import annotations

import functools

from relax_sdk.config import RunConfig
from relax_sdk.mask import ExplainedToken, MaskExplanation
from relax_server.journal.explain import ExplainedSample, Explanation, explain
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor
from relax_server.roles.layout import RunLayout
from relax_server.roles.looking import open_records, read_episode


def explain_mask(config: RunConfig, layout: RunLayout, episode: str) -> MaskExplanation:
    """Explain the tokens of an episode, see `relax_sdk.mask`."""
    trajectory = read_episode(config, layout, episode)
    with open_records(config, layout) as journal:
        group, trained = journal.group_row(trajectory.group_id), journal.trained(trajectory.group_id)
    found = explain(trajectory, group, trained)
    return told(trajectory.id, found, Processor.load(resolve_model(config.model, config.seed, config.media)))


def told(id: str, found: Explanation, processor: Processor) -> MaskExplanation:
    """An explanation with the text of each token.

    Args:
        id: of the trajectory.
        found: why each token is masked or not.
        processor: of the model that the tokens are of.
    """
    text = functools.lru_cache(maxsize=None)(lambda token: processor.decode([token]))

    def tokens(each: ExplainedSample) -> tuple[ExplainedToken, ...]:
        sample, out = each.sample, []
        for position, (token, mask) in enumerate(zip(sample.ids, sample.loss_mask, strict=True)):
            written = (sample.logprobs[position], sample.versions[position]) if mask else (None, None)
            out.append(ExplainedToken(position, token, text(token), mask, found.reasons[each.why[position]], *written))
        return tuple(out)

    return MaskExplanation(id, tuple(map(tokens, found.samples)))
