"""The plain transformers forward that engines are measured against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from relax_server.engines.base import Generation
from relax_server.models.processor import MediaFeatures, Processor

from relax_sdk.media import Media

torch.set_num_threads(1)


class Reference:
    """One model folder, run whole sequence by whole sequence without any cache."""

    def __init__(self, path: Path) -> None:
        self.processor = Processor.load(path)
        cls: Any = (
            transformers.Qwen3OmniMoeThinkerForConditionalGeneration
            if self.processor.is_omni
            else transformers.AutoModelForCausalLM
        )
        self.model = cls.from_pretrained(path, dtype=torch.float32).eval()

    def features(self, media: Sequence[Media]) -> list[MediaFeatures]:
        return [self.processor.features(m.bytes(), m.ref.sha256, m.kind) for m in media]

    @torch.no_grad()
    def logits(self, ids: Sequence[int], media: Sequence[Media] = ()) -> torch.Tensor:
        """float32 [len(ids), vocabulary], banned ids at -inf; `ids` are expanded."""
        tensor = torch.tensor([list(ids)])
        logits = self.model(input_ids=tensor, attention_mask=torch.ones_like(tensor), **self._media(media)).logits[0].float()
        logits[:, list(self.processor.banned_ids)] = -torch.inf
        return logits

    def logprobs(
        self, prompt: Sequence[int], response: Sequence[int], media: Sequence[Media] = (), temperature: float = 1.0
    ) -> np.ndarray:
        """Of each response token: float [len(response)]."""
        logits = self.logits([*prompt, *response], media)[len(prompt) - 1 : -1] / temperature
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

    def _media(self, media: Sequence[Media]) -> dict[str, Any]:
        by_kind: dict[str, list[MediaFeatures]] = {"image": [], "audio": [], "video": []}
        for item in self.features(media):
            by_kind[item.kind].append(item)
        out: dict[str, Any] = {}
        if images := by_kind["image"]:
            out["pixel_values"] = torch.from_numpy(np.concatenate([f.tensor for f in images]))
            out["image_grid_thw"] = torch.tensor([f.grid for f in images])
        if videos := by_kind["video"]:
            out["pixel_values_videos"] = torch.from_numpy(np.concatenate([f.tensor for f in videos]))
            out["video_grid_thw"] = torch.tensor([f.grid for f in videos])
            out["video_second_per_grid"] = torch.tensor([f.second_per_grid for f in videos])
        if sounds := by_kind["audio"]:
            longest = max(f.tensor.shape[1] for f in sounds)
            out["input_features"] = torch.from_numpy(
                np.stack([np.pad(f.tensor, ((0, 0), (0, longest - f.tensor.shape[1]))) for f in sounds])
            )
            out["feature_attention_mask"] = torch.tensor([[int(i < f.tensor.shape[1]) for i in range(longest)] for f in sounds])
        return out

    def check(self, generation: Generation, media: Sequence[Media] = (), temperature: float = 1.0) -> None:
        """Assert that the generation's logprobs are this model's."""
        expected = self.logprobs(generation.prompt_ids, generation.response_ids, media, temperature)
        gap = np.abs(expected - np.asarray(generation.logprobs))
        assert gap.max() <= 1e-4 and gap.mean() <= 1e-5, f"max {gap.max():.2e}, mean {gap.mean():.2e}"
