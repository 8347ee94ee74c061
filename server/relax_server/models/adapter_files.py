"""Low-rank adapters in a file, and the weights that a model has with them: what a trainer publishes and an engine merges.

`adapters.safetensors` holds A and B of each layer as `LAYER.lora_A.weight` [rank, inputs] and `LAYER.lora_B.weight` [outputs,
rank], with the names that the layers have in the model's folder, experts one by one; and, under their own names, tensors of the
model that are trained whole. Its metadata say what is multiplied to B A, and which base weights the adapters belong to.
"""

from __future__ import annotations

import hashlib
import os
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from relax_sdk.errors import ConfigError
from relax_server.models.weight_files import FolderWeights, weight_files

if TYPE_CHECKING:
    from torch import Tensor, dtype

ADAPTERS = "adapters.safetensors"
A, B = ".lora_A.weight", ".lora_B.weight"
SAMPLES, SAMPLE_BYTES = 32, 1 << 16
"""Places of a file that its fingerprint is made of, and bytes of each."""

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj")


@dataclass(frozen=True)
class Adapters:
    """Adapters of a model."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """A [rank, inputs] and B [outputs, rank] by the name of the layer."""
    whole: Mapping[str, Tensor]
    """Tensors that are trained whole, by their name in the folder."""
    scale: float
    """The layer's weight is that of the base plus `scale * B @ A`."""
    base: str
    """Fingerprint of the folder that the base weights are in."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(a.nbytes + b.nbytes for a, b in self.pairs.values()) + sum(t.nbytes for t in self.whole.values())

    def changes(self, names: Iterable[str]) -> set[str]:
        """Names of the base's tensors that are other ones with the adapters.

        Args:
            names: of all of the base's tensors; a dictionary or set.

        Raises:
            ConfigError: an adapter has no place there.
        """
        return {*self.whole, *(place_of(layer, names)[0] for layer in self.pairs)}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by the names that they have in the file."""
        out = dict(self.whole)
        for layer, (a, b) in self.pairs.items():
            out[layer + A], out[layer + B] = a, b
        return out


def delta(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """What an adapter adds to a weight, `scale * B @ A`, float32 [outputs, inputs]."""
    return scale * (b.float() @ a.float())


def write_adapters(adapters: Adapters, folder: Path) -> None:
    """Write `adapters.safetensors` under another name and rename it; there must be room."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{ADAPTERS}.{uuid.uuid4().hex}"
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in adapters.tensors().items()}
    metadata = {"format": "pt", "scale": repr(adapters.scale), "base": adapters.base}
    try:
        save_file(tensors, temporary, metadata)
        os.replace(temporary, folder / ADAPTERS)
    finally:
        temporary.unlink(missing_ok=True)


def read_adapters(folder: Path) -> Adapters | None:
    """Read what `write_adapters` wrote; None where a folder has no such file.

    Raises:
        ConfigError: the file is damaged, or not one of adapters.
    """
    from safetensors import SafetensorError, safe_open

    file = folder / ADAPTERS
    if not file.exists():
        return None
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        layers = [name.removesuffix(A) for name in tensors if name.endswith(A)]
        pairs = {layer: (tensors.pop(layer + A), tensors.pop(layer + B)) for layer in layers}
        return Adapters(pairs, tensors, float(metadata["scale"]), metadata["base"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as adapters ({error!r}); it is damaged or cut short") from error


def fingerprint(folder: Path) -> str:
    """Tell the weights of a model folder from others, by the heads of its files and samples of their bytes.

    Raises:
        ConfigError: the folder has no weights.
    """
    digest = hashlib.sha256()
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{size} ".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(8 + int.from_bytes(stream.read(8), "little")))
            for place in range(SAMPLES):
                stream.seek(max(0, (size - SAMPLE_BYTES) * place // (SAMPLES - 1)))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def place_of(layer: str, names: Iterable[str]) -> tuple[str, int | None, str]:
    """Find the tensor of a folder that holds a layer's weight.

    Args:
        layer: name of the layer.
        names: of the folder's tensors; a dictionary or set.

    Returns:
        Name of the tensor; the number of the expert where it holds all of them; and `gate`, `up` or `down` then.

    Raises:
        ConfigError: the folder has no such layer.
    """
    if f"{layer}.weight" in names:
        return f"{layer}.weight", None, ""
    found = _EXPERT.fullmatch(layer)
    if found is not None:
        fused = f"{found[1]}.{'down_proj' if found[3] == 'down' else 'gate_up_proj'}"
        if fused in names:
            return fused, int(found[2]), found[3]
    raise ConfigError(f"the adapters have a layer {layer}, and the base weights do not: they are of another model")


def merged(base: FolderWeights, adapters: Adapters, dtype: dtype, more: Iterable[str] = ()) -> dict[str, Tensor]:
    """The tensors that a model with adapters has other ones of than its base.

    Args:
        base: the weights that the adapters belong to.
        adapters: of this model.
        dtype: of the result; the base is taken in it, as the trainer has it.
        more: names of further tensors that are wanted.

    Returns:
        By the names in the base's folder; new tensors where there is an adapter, else views of the files.

    Raises:
        ConfigError: a layer or tensor is not in the base, or has another shape.
    """
    layers: dict[str, list[tuple[int | None, str, Tensor, Tensor]]] = {}
    for layer, (a, b) in adapters.pairs.items():
        name, expert, kind = place_of(layer, base.shapes)
        layers.setdefault(name, []).append((expert, kind, a, b))
    out = dict(adapters.whole)
    for name in [n for n in [*layers, *more] if n not in out]:
        out[name] = base.read(name).to(dtype)
        if name in layers:
            out[name] = _with_adapters(out[name], layers[name], adapters.scale, f"{base.where(name)}")
    return out


def _with_adapters(weight: Tensor, pairs: list[tuple[int | None, str, Tensor, Tensor]], scale: float, where: str) -> Tensor:
    total = weight.float().clone()
    for expert, kind, a, b in pairs:
        part = total if expert is None else total[expert]
        if expert is not None:
            part = part.t() if part.shape[1] != a.shape[1] else part  # stacked as [experts, inputs, outputs]
        if expert is not None and kind != "down":
            part = part.chunk(2)[0 if kind == "gate" else 1]
        if part.shape != (b.shape[0], a.shape[1]):
            raise ConfigError(f"{where}: shape {list(part.shape)}, and its adapter is of {[b.shape[0], a.shape[1]]}")
        part += delta(a, b, scale)
    return total.to(weight.dtype)
