"""Media for the models of the plugin, prepared by the code that prepares them for the trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

from relax_sdk.errors import RelaxError
from relax_server.engines.embedded.core import Prompt, PromptMedia
from relax_server.engines.embedded.prompts import PromptBuilder
from relax_server.engines.sglang.plugin.models.omni import Qwen3OmniMoeThinkerForConditionalGeneration
from relax_server.engines.sglang.plugin.models.vision import EntryClass
from relax_server.engines.sglang.plugin.positions import POSITIONS
from relax_server.models.media_features import Kind
from relax_server.models.processor import Processor


class MediaProcessor(BaseMultimodalProcessor):
    """Expands token ids, and never decodes them; used in SGLang's tokenizer process."""

    models = [Qwen3OmniMoeThinkerForConditionalGeneration, *EntryClass]

    def __init__(self, hf_config: Any, server_args: Any, _processor: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(hf_config, server_args, _processor, *args, **kwargs)
        root, shared = (os.environ.get(name) for name in ("RELAX_MEDIA_ROOT", "RELAX_FEATURES"))
        self.processor = Processor.load(server_args.model_path, Path(shared) if shared else None)
        self.prompts = PromptBuilder(self.processor, Path(root) if root else None)
        _refuse_lone_placeholders(self.processor)

    async def process_mm_data_async(
        self, image_data: Any, audio_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> MultimodalProcessorOutput:
        """A prompt with its media.

        Raises:
            ValueError: media that do not fit the placeholders, or cannot be read; SGLang answers 400.
        """
        given: dict[Kind, Any] = {"image": image_data, "audio": audio_data, "video": request_obj.video_data}
        ids = (
            self.processor.tokenizer.encode(input_text, add_special_tokens=False) if isinstance(input_text, str) else input_text
        )
        try:
            prompt = await self.prompts.build(ids, {kind: _sources(items) for kind, items in given.items()})
        except RelaxError as error:
            raise ValueError(str(error)) from error
        return self._output(prompt)

    def _output(self, prompt: Prompt) -> MultimodalProcessorOutput:
        items = [_item(media) for media in prompt.media]
        assert prompt.positions is not None
        positions = torch.from_numpy(np.ascontiguousarray(prompt.positions))
        items[0].model_specific_data[POSITIONS] = positions
        whole = positions.long()  # what SGLang itself carries along; the model takes the fractions
        placeholders = self.processor.placeholder_ids
        return MultimodalProcessorOutput(
            input_ids=list(prompt.ids),
            padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(prompt.ids, items),
            mm_items=items,
            im_token_id=placeholders["image"],
            video_token_id=placeholders["video"],
            audio_token_id=placeholders.get("audio"),
            mrope_positions=whole,
            mrope_position_delta=torch.tensor([[int(whole.max()) + 1 - len(prompt)]]),
        )


def _refuse_lone_placeholders(processor: Processor) -> None:
    """A processor is not asked where a request has no media at all, so placeholders without media would be taken for text."""
    kinds = {id: kind for kind, id in processor.placeholder_ids.items()}
    validate = TokenizerManager._validate_one_request

    def checked(self: TokenizerManager, obj: Any, input_ids: Any) -> None:
        found = [kinds[id] for id in input_ids or () if id in kinds]
        if found and not obj.contains_mm_input():
            counts = {kind: found.count(kind) for kind in dict.fromkeys(found)}
            raise ValueError(f"the prompt has media placeholders {counts} but the request brings no media")
        validate(self, obj, input_ids)

    TokenizerManager._validate_one_request = checked


def _sources(items: Any) -> list[str]:
    """Paths and data URIs of one kind."""
    rows: Sequence[Any] = () if items is None else items if isinstance(items, list) else [items]
    return [row if isinstance(row, str) else str(getattr(row, "url", row)) for row in rows]


def _item(media: PromptMedia) -> MultimodalDataItem:
    features = media.features
    tensor = torch.from_numpy(np.array(features.tensor))
    item = MultimodalDataItem(modality=Modality[features.kind.upper()], offsets=_runs(media))
    if features.kind == "audio":
        item.feature = tensor[None]
        item.model_specific_data["feature_attention_mask"] = torch.ones(1, tensor.shape[1], dtype=torch.long)
    else:
        assert features.grid is not None
        item.feature = tensor
        item.model_specific_data[f"{features.kind}_grid_thw"] = torch.tensor([features.grid])
    item.set_hash(media.key & (2**64 - 1))
    return item


def _runs(media: PromptMedia) -> list[tuple[int, int]]:
    """First and last token of each run of placeholders; between those of a film there may be text that tells the time."""
    edges = np.diff(np.concatenate([[0], media.rows >= 0, [0]]).astype(np.int8))
    first, after = (np.flatnonzero(edges == sign) + media.start for sign in (1, -1))
    return [(int(a), int(b) - 1) for a, b in zip(first, after, strict=True)]
