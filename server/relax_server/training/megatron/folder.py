"""Writing a Hugging Face folder, so that a reader never sees half a file."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from relax_server.models.weight_files import WEIGHTS

_NOT_COPIED = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


def write_weights(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write `model.safetensors` under another name and rename it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{WEIGHTS}.{uuid.uuid4().hex}"
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary, metadata={"format": "pt"})
        os.replace(temporary, folder / WEIGHTS)
    finally:
        temporary.unlink(missing_ok=True)


def copy_rest(source: Path, folder: Path) -> None:
    """Copy all of a model folder except its weights: configuration, tokenizer, chat template, preprocessor."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_NOT_COPIED):
            shutil.copyfile(file, folder / file.name)
