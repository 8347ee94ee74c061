"""The plain transformers forward that engines are measured against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from relax_server.engines.base import Generation
from relax_server.models.hf_inputs import hf_inputs
from relax_server.models.processor import MediaFeatures, Processor

from relax_sdk.media import Media

torch.set_num_threads(1)


class Reference:
    """One model folder, run whole sequence by whole sequence without any cache."""

    def __init__(self, path: Path) -> None:
        self.processor = Processor.load(path)
        self.model = self.processor.family.model_class().from_pretrained(path, dtype=torch.float32).eval()

    def features(self, media: Sequence[Media]) -> list[MediaFeatures]:
        return [self.processor.features(m.bytes(), m.ref.sha256, m.kind) for m in media]

    @torch.no_grad()
    def logits(self, ids: Sequence[int], media: Sequence[Media] = ()) -> torch.Tensor:
        """float32 [len(ids), vocabulary], banned ids at -inf; `ids` are expanded."""
        tensor = torch.tensor([list(ids)])
        if hasattr(self.model.model, "rope_deltas"):
            self.model.model.rope_deltas = None
        inputs = hf_inputs(self.features(media), self.processor.family, tensor, self.processor.hf_config)
        logits = self.model(input_ids=tensor, attention_mask=torch.ones_like(tensor), **inputs).logits[0].float()
        logits[:, list(self.processor.banned_ids)] = -torch.inf
        return logits

    def logprobs(
        self,
        prompt: Sequence[int],
        response: Sequence[int],
        media: Sequence[Media] = (),
        temperature: float = 1.0,
        top_k: int = -1,
        top_p: float = 1.0,
    ) -> np.ndarray:
        """The logprob of each response token, float [len(response)], under transformers' own cuts."""
        logits = self.logits([*prompt, *response], media)[len(prompt) - 1 : -1] / temperature
        cuts = [transformers.TopKLogitsWarper(top_k)] if top_k > 0 else []
        for cut in [*cuts, *([transformers.TopPLogitsWarper(top_p)] if top_p < 1 else [])]:
            logits = cut(torch.tensor([list(prompt)]), logits)
        return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0].numpy()

    @torch.no_grad()
    def routes(self, ids: Sequence[int], media: Sequence[Media] = ()) -> np.ndarray:
        """Experts of each token: int [len(ids), layers, top_k]."""
        seen: list[torch.Tensor] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda m, a, out: seen.append(out[2]))
            for layer in self.model.model.language_model.layers
        ]
        self.logits(ids, media)
        for hook in hooks:
            hook.remove()
        return torch.stack(seen, 1).numpy()

    def check(self, generation: Generation, media: Sequence[Media] = (), **sampling: Any) -> None:
        """Assert that the generation's logprobs are this model's; `sampling` as for `logprobs`."""
        expected = self.logprobs(generation.prompt_ids, generation.response_ids, media, **sampling)
        gap = np.abs(expected - np.asarray(generation.logprobs))
        assert gap.max() <= 1e-4 and gap.mean() <= 1e-5, f"max {gap.max():.2e}, mean {gap.mean():.2e}"
