"""Megatron-Core as the trainer: process groups, models over packed forests, Hugging Face weights, checkpoints."""

import warnings

for _library in ("Transformer Engine and Apex are not installed", "Apex is not installed"):
    warnings.filterwarnings("ignore", message=_library)  # Megatron says so at import, several times
