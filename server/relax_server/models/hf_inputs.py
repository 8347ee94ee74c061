"""Media features as the keyword arguments of transformers' own forward: what engine and trainer are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from relax_server.models.media_features import MediaFeatures

if TYPE_CHECKING:
    from torch import Tensor


def hf_inputs(features: Sequence[MediaFeatures]) -> dict[str, Tensor]:
    """Arguments of `Qwen3OmniMoeThinkerForConditionalGeneration.forward` for the media of one sequence.

    Args:
        features: in the order of their placeholders.

    Returns:
        For images `pixel_values` float32 [patches, channels] and `image_grid_thw` int64 [images, 3]; for videos the same with
        their names and `video_second_per_grid` [videos]; for sounds `input_features` float32 [sounds, mel, frames] padded with
        zeros and `feature_attention_mask` int64 [sounds, frames].
    """
    import torch

    of = {kind: [f for f in features if f.kind == kind] for kind in ("image", "audio", "video")}
    inputs: dict[str, Tensor] = {}
    if images := of["image"]:
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([f.tensor for f in images]))
        inputs["image_grid_thw"] = torch.tensor([f.grid for f in images])
    if videos := of["video"]:
        inputs["pixel_values_videos"] = torch.from_numpy(np.concatenate([f.tensor for f in videos]))
        inputs["video_grid_thw"] = torch.tensor([f.grid for f in videos])
        inputs["video_second_per_grid"] = torch.tensor([f.second_per_grid for f in videos])
    if sounds := of["audio"]:
        lengths = [f.tensor.shape[1] for f in sounds]
        longest = max(lengths)
        padded = [np.pad(f.tensor, ((0, 0), (0, longest - n))) for f, n in zip(sounds, lengths, strict=True)]
        inputs["input_features"] = torch.from_numpy(np.stack(padded))
        inputs["feature_attention_mask"] = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return inputs
