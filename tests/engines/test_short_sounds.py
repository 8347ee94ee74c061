"""Sounds shorter than the tower's window come out the same alone and beside others: the trainer takes each as if alone."""

import numpy as np
import torch
from relax_server.engines.embedded.model import ModelRunner
from relax_server.models.catalog import resolve_model
from relax_server.models.processor import Processor

from relax_sdk import Audio


def test_a_short_sound_does_not_depend_on_its_neighbours():
    processor = Processor.load(resolve_model("relax/tiny-omni"))
    runner = ModelRunner(processor.path, processor.hf_config, torch.float32, record_routes=False)
    sounds = [Audio.from_array(0.3 * np.sin(np.arange(int(16_000 * s)) / 5)) for s in (0.2, 0.35, 1.0, 2.3, 0.2)]
    items = [processor.features(s.bytes(), s.ref.sha256, "audio") for s in sounds]
    with torch.no_grad():
        together = runner.embed_media(items)
        for item, embedding in zip(items, together, strict=True):
            (alone,) = runner.embed_media([item])
            assert len(embedding.embeds) == item.n_tokens
            torch.testing.assert_close(embedding.embeds, alone.embeds, rtol=0, atol=1e-6)
