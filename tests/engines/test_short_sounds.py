"""Sounds shorter than the tower's window come out the same alone and beside others: the trainer takes each as if alone."""

import numpy as np
import torch
from relax_server.engines.embedded.model import ModelRunner
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor

from relax_sdk import Audio


def test_a_short_sound_does_not_depend_on_its_neighbours():
    """In float64, so that only what is computed counts, not in which order it is summed.

    A matrix product of more rows may take another kernel, which sums in another order: in float32, and with two threads, that
    alone made 1.01e-6. The bound is that of sums in any order: half a unit in the last place for each term of each sum on the
    way, relative to the largest output, and twice, as both sides round. Padding to the longest sound of a call, which the test
    is for, makes 6e-2.
    """
    processor = Processor.load(resolve_model("relax/tiny-omni"))
    runner = ModelRunner(processor.path, processor.hf_config, torch.float64, record_routes=False)
    sounds = [Audio.from_array(0.3 * np.sin(np.arange(int(16_000 * s)) / 5)) for s in (0.2, 0.35, 1.0, 2.3, 0.2)]
    items = [processor.features(s.bytes(), s.ref.sha256, "audio") for s in sounds]
    weights = [weight for weight in runner.model.model.audio_tower.parameters() if weight.dim() > 1]
    terms = sum(weight[0].numel() for weight in weights)
    with torch.no_grad():
        together = runner.embed_media(items)
        bound = torch.finfo(torch.float64).eps * terms * max(float(e.embeds.abs().max()) for e in together)
        assert bound < 1e-11
        for item, embedding in zip(items, together, strict=True):
            (alone,) = runner.embed_media([item])
            assert len(embedding.embeds) == item.n_tokens
            torch.testing.assert_close(embedding.embeds, alone.embeds, rtol=0, atol=bound)
