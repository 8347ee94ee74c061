"""Teaches SGLang the omni thinker and the models that see, through its extension points for models and processors.

SGLang itself serves `Qwen3OmniMoeForConditionalGeneration`, with weights under `thinker.` and media prepared by libraries of
its own: other frames of a video, other sizes, whole-number positions, prompts that are decoded and encoded again. A trainer
cannot follow that token by token. Here media go through the very code that prepares them for the trainer, token ids stay as
they were sent, and positions are the fractions that transformers computes.

These modules are only ever imported by SGLang's process (`SGLANG_EXTERNAL_MODEL_PACKAGE` and its siblings).
"""
