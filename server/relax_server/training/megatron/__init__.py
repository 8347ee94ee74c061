"""Megatron-Core as the trainer: process groups, models over packed forests, Hugging Face weights, checkpoints."""

import warnings

import torch

for _library in ("Transformer Engine and Apex are not installed", "Apex is not installed"):
    warnings.filterwarnings("ignore", message=_library)  # Megatron says so at import, several times


def _import_megatron() -> None:
    """Import Megatron-Core; without CUDA, keep `torch.compile` from loading its compiler meanwhile.

    Megatron decorates functions with it while it is imported, which costs two seconds of processor time in every process. On a
    CPU these functions run as they are written.
    """
    compile_ = torch.compile
    if not torch.cuda.is_available():
        torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        import megatron.core  # noqa: F401
    finally:
        torch.compile = compile_


_import_megatron()
