"""Low-rank adapters (LoRA, arXiv 2106.09685) on Megatron's parallel linear layers and on the linear layers of towers.

A layer stays where it is, with the weight and the name that it has; it gets a child `adapter`, and its class becomes one that
adds what the adapter says. So nothing else of the model knows of adapters: not the links to Hugging Face weights, not Megatron.

Under tensor parallelism A or B is divided as the weight is:

| layer | A | B | what is communicated |
|---|---|---|---|
| column-parallel | whole on every rank | by outputs | backward: the gradient of `A x`, [tokens, rank], is summed |
| row-parallel | by inputs | whole on every rank | forward: `A x` is summed |

With sequence parallelism the sums become gathers and scatters over tokens, and matrices that are whole on every rank get the
gradient of a part of the tokens; Megatron sums those that are marked `sequence_parallel`. Inside experts whose channels are
divided the dispatcher of tokens communicates, so the gradients of whole matrices are summed here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from relax_sdk.tuning import LoraConfig
from relax_server.models.adapter_files import delta
from relax_server.training.megatron.adapted_weights import AdaptedWeight

MARK = ".adapter.lora_"
"""The part of a name that every parameter of an adapter has, and no other."""


def is_adapter(parameter: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return MARK in parameter


@dataclass(frozen=True)
class Division:
    """The part of a layer that this rank has."""

    group: Any = None
    size: int = 1
    rank: int = 0

    @classmethod
    def of(cls, layer: Any) -> Division:
        """Ask one of Megatron's parallel layers; any other layer is whole on every rank."""
        group = getattr(layer, "tp_group", None)
        return cls() if group is None else cls(group, group.size(), group.rank())


class Adapter(torch.nn.Module):
    """Pairs of A and B for one layer, one pair for each Hugging Face tensor that is in its weight.

    Args:
        weight: of the layer, [outputs, inputs], of this rank.
        adapted: which Hugging Face tensors it holds, and how.
        lora: rank and alpha.
        seed: A is drawn from it and from the tensor's name, so that it does not depend on how the model is divided.
        cut: 0: this rank has some of the outputs; 1: some of the inputs; None: all.
        division: of the layer over ranks.
    """

    def __init__(
        self,
        weight: torch.nn.Parameter,
        adapted: AdaptedWeight,
        lora: LoraConfig,
        seed: int,
        cut: int | None,
        division: Division,
    ) -> None:
        super().__init__()
        self.adapted, self.scale, self.rank = adapted, lora.scale, lora.rank
        self.on = True
        """False: the layer is as it would be without. Only whole passes without gradient are made so (`switched_off`)."""
        outputs = [len(t) for t in adapted.split(weight.detach().to("meta"))]
        inputs = weight.shape[1]
        self.lora_A: Any = torch.nn.ParameterDict()
        self.lora_B: Any = torch.nn.ParameterDict()
        for name, tensor, n in zip(adapted.short_names, adapted.names, outputs, strict=True):
            whole = _drawn(lora.rank, inputs * (division.size if cut == 1 else 1), seed, tensor)
            mine = whole[:, division.rank * inputs :][:, :inputs] if cut == 1 else whole
            self.lora_A[name] = torch.nn.Parameter(mine.to(weight, copy=True))
            self.lora_B[name] = torch.nn.Parameter(weight.new_zeros(n, lora.rank))
        self._mark(weight, cut)

    def _mark(self, weight: Any, cut: int | None) -> None:
        """Tell Megatron which parameters are divided, and whose gradients it has to sum.

        Of what is not marked as divided, the gradient norm counts that of one tensor-parallel rank; where experts are divided,
        each of these ranks has experts of its own.
        """
        shared = getattr(weight, "allreduce", True)
        for matrices, dim in ((self.lora_A, 1), (self.lora_B, 0)):
            for parameter in matrices.values():
                marked: Any = parameter
                marked.allreduce = shared
                if dim == cut or not shared:
                    set_tensor_model_parallel_attributes(parameter, True, dim, 1)

    def of_sequence_parallel(self, cut: int) -> None:
        """Mark the matrices that are whole on every rank: each rank sees a part of the tokens."""
        for parameter in (self.lora_A if cut == 0 else self.lora_B).values():
            marked: Any = parameter
            marked.sequence_parallel = True

    def matrices(self) -> tuple[Tensor, Tensor]:
        """A [pairs * rank, inputs] and B [outputs, pairs * rank] of the layer's weight: `scale * B @ A` is what is added to it.

        B has each pair's own in rows that the weight has the pair's outputs in, and zeros elsewhere.
        """
        a = [*self.lora_A.values()]
        b = [*self.lora_B.values()]
        if len(a) == 1:
            return a[0], b[0]
        rank = a[0].shape[0]
        wide = [torch.nn.functional.pad(t, (i * rank, (len(b) - 1 - i) * rank)) for i, t in enumerate(b)]
        return torch.cat(a), self.adapted.join(wide)

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of this rank by the name of the Hugging Face layer, without gradient."""
        both = zip(self.adapted.names, self.lora_A.values(), self.lora_B.values(), strict=True)
        return {name: (a.detach(), b.detach()) for name, a, b in both}

    def delta(self) -> Tensor:
        """What is added to the layer's weight, float32 [outputs, inputs] of this rank."""
        return self.adapted.join([delta(a, b, self.scale) for a, b in self.pairs().values()])


def _drawn(rank: int, inputs: int, seed: int, name: str) -> Tensor:
    """A whole A, float32: uniform with the variance 1 / (3 inputs), as PEFT draws it (He et al. 1502.01852, a = sqrt 5)."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7]))
    return (2 * torch.rand(rank, inputs, generator=generator, dtype=torch.float32) - 1) * inputs**-0.5


class AdaptedColumn(ColumnParallelLinear):
    """Megatron's column-parallel layer with an adapter."""

    adapter: Adapter
    cut = 0

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As Megatron's: input [tokens, …, inputs], output [tokens, …, outputs of this rank], and a separate bias."""
        output, bias = super().forward(input_, *args, **kwargs)
        if not self.adapter.on:
            return output, bias
        a, b = self.adapter.matrices()
        if self.explicit_expert_comm:
            inner = input_ @ copy_to_tensor_model_parallel_region(a, group=self.tp_group).t()
        elif self.sequence_parallel:
            inner = gather_from_sequence_parallel_region(input_ @ a.t(), group=self.tp_group)
        else:
            inner = copy_to_tensor_model_parallel_region(input_ @ a.t(), group=self.tp_group)
        return output + self.adapter.scale * (inner @ b.t()), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
        """As Megatron's, which does not know how adapters are divided."""
        return _sharded(self, {"weight": 0, "bias": 0}, prefix, sharded_offsets, metadata)


class AdaptedRow(RowParallelLinear):
    """Megatron's row-parallel layer with an adapter."""

    adapter: Adapter
    cut = 1

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """As Megatron's: input [tokens, …, inputs of this rank], output [tokens, …, outputs], and a separate bias."""
        output, bias = super().forward(input_)
        if not self.adapter.on:
            return output, bias
        a, b = self.adapter.matrices()
        inner = input_ @ a.t()
        if self.explicit_expert_comm:
            b = copy_to_tensor_model_parallel_region(b, group=self.tp_group)
        elif self.sequence_parallel:
            inner = reduce_scatter_to_sequence_parallel_region(inner, group=self.tp_group)
        else:
            inner = reduce_from_tensor_model_parallel_region(inner, group=self.tp_group)
        return output + self.adapter.scale * (inner @ b.t()), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
        """As Megatron's, which does not know how adapters are divided."""
        return _sharded(self, {"weight": 1}, prefix, sharded_offsets, metadata)


class AdaptedLinear(torch.nn.Linear):
    """A linear layer of a tower with an adapter; every rank has all of both."""

    adapter: Adapter
    cut = None

    def forward(self, input: Tensor) -> Tensor:
        """As torch's: [.., inputs] to [.., outputs]."""
        output = super().forward(input)
        if not self.adapter.on:
            return output
        a, b = self.adapter.matrices()
        return output + self.adapter.scale * ((input @ a.t()) @ b.t())


ADAPTED: dict[type, type] = {
    ColumnParallelLinear: AdaptedColumn,
    RowParallelLinear: AdaptedRow,
    torch.nn.Linear: AdaptedLinear,
}


def _sharded(layer: Any, axes: Mapping[str, int], prefix: str, offsets: tuple, metadata: Any) -> Any:
    matrices = layer.adapter.lora_A if layer.cut == 1 else layer.adapter.lora_B
    kind = "lora_A" if layer.cut == 1 else "lora_B"
    return make_sharded_tensors_for_checkpoint(
        layer.state_dict(prefix="", keep_vars=True),
        prefix,
        {**axes, **{f"adapter.{kind}.{name}": layer.cut for name in matrices}},
        offsets,
        tp_group=layer.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )


def adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    """The layers of a model that have an adapter, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, tuple(ADAPTED.values()))}
