"""Media features as the keyword arguments of transformers' own forward: what engine and trainer are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from relax_server.models.families import Family
from relax_server.models.families.qwen3_omni import QWEN3_OMNI
from relax_server.models.media_item import MediaFeatures

if TYPE_CHECKING:
    from torch import Tensor


def hf_inputs(
    features: Sequence[MediaFeatures], family: Family = QWEN3_OMNI, ids: Tensor | None = None, config: Any = None
) -> dict[str, Any]:
    """Arguments of a family's `forward` in transformers for the media of one sequence.

    Args:
        features: in the order of their placeholders.
        family: of the model.
        ids: int64 [1, n], the expanded ids; needed by families that are told which tokens are media.
        config: of the model, needed with `ids`.

    Returns:
        For images `pixel_values` float32 [patches, channels] and `image_grid_thw` int64 [images, 3]; for videos the same with
        their names, and seconds float32 [videos] where the family takes them; for sounds `input_features` float32
        [sounds, mel, frames] padded with zeros and `feature_attention_mask` int64 [sounds, frames].
    """
    import torch

    rule = family.media
    of = {kind: [f for f in features if f.kind == kind] for kind in ("image", "video")}
    inputs: dict[str, Any] = {}
    if rule is not None and rule.hf_types and features:
        assert ids is not None
        inputs["mm_token_type_ids"] = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    if images := of["image"]:
        inputs["pixel_values"] = torch.from_numpy(np.concatenate([f.tensor for f in images]))
        inputs["image_grid_thw"] = torch.tensor([f.grid for f in images])
    if videos := of["video"]:
        inputs["pixel_values_videos"] = torch.from_numpy(np.concatenate([f.tensor for f in videos]))
        inputs["video_grid_thw"] = torch.tensor([f.grid for f in videos])
        if rule is not None and rule.hf_seconds is not None:
            inputs[rule.hf_seconds] = torch.tensor([f.second_per_grid for f in videos])
        if any(f.sound is not None for f in videos):
            inputs["use_audio_in_video"] = True
    if sounds := [f.heard for f in features if f.heard is not None]:
        lengths = [f.tensor.shape[1] for f in sounds]
        longest = max(lengths)
        padded = [np.pad(f.tensor, ((0, 0), (0, longest - n))) for f, n in zip(sounds, lengths, strict=True)]
        inputs["input_features"] = torch.from_numpy(np.stack(padded))
        inputs["feature_attention_mask"] = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return inputs
