"""The byte-level tokenizer and chat template of the small built-in models."""

from __future__ import annotations

from typing import Any

SPECIAL = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""Media tokens by the names Qwen3-Omni's tokenizer gives them; none of them may be sampled."""

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]

CHAT_TEMPLATE = (
    "{%- if tools -%}<|im_start|>system{{ '\n' }}"
    "{%- for t in tools -%}{{ t.function.name }}({{ t.function.parameters.properties | list | join(',') }}){{ '\n' }}"
    "{%- endfor -%}"
    "<|im_end|>\n{%- endif -%}"
    "{%- for m in messages -%}<|im_start|>{{ m.role }}{{ '\n' }}"
    "{%- if m.content is string -%}{{ m.content }}"
    "{%- else -%}{%- for c in m.content -%}"
    "{%- if c.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>"
    "{%- elif c.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>"
    "{%- elif c.type == 'audio' -%}<|audio_start|><|audio_pad|><|audio_end|>"
    "{%- else -%}{{ c.text }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{%- for t in (m.tool_calls or []) -%}<tool_call>{{ t.function.name }}("
    "{%- for v in t.function.arguments.values() -%}{{ v | tojson }}{{ ',' if not loop.last }}{%- endfor -%}"
    ")</tool_call>{%- endfor -%}"
    "<|im_end|>{{ '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}"
)
"""ChatML; tools and tool calls are written as Python calls with positional arguments, since every character is a token."""


def byte_tokenizer() -> Any:
    """A tokenizer with one token per byte, the Qwen media tokens and ChatML control tokens (268 in all)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary: dict[str, int] = {}
    for token in [*CONTROL, *SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]:
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in [*CONTROL, *SPECIAL.values()]])
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=SPECIAL,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
