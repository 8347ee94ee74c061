"""Megatron's data-parallel wrapper, optimizer and schedule around one model, with forests as micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from relax_sdk.config import OptimizerConfig
from relax_sdk.errors import ConfigError, TrainingError
from relax_sdk.tuning import TowersConfig
from relax_server.training.megatron import parallel
from relax_server.training.megatron.forest_model import ForestModel
from relax_server.training.megatron.host_memory import HostMemory, gradients, optimizer_tensors
from relax_server.training.megatron.interleaved import RankModel
from relax_server.training.megatron.micro_batch import MicroBatch
from relax_server.training.megatron.tower_rates import own_groups, rate_of
from relax_server.training.scoring import Predictions

Loss = Callable[[Predictions, int], tuple[Tensor, int, Any]]
"""Takes what is predicted at the forest's rows and the micro-batch's number; returns (sum of its tokens' losses, number of
tokens, anything else)."""


class MegatronTrainer:
    """One optimizer step at a time.

    The loss functions return sums and counts; Megatron adds gradients and counts over micro-batches and data-parallel ranks
    and divides once (`calculate_per_token_loss`), so that the mean is over the tokens of the global batch, however it was
    split.

    Raises:
        ConfigError: a rank of the layout has nothing to train, where Megatron's optimizer needs something.
    """

    def __init__(
        self,
        model: RankModel,
        optimizer: OptimizerConfig,
        dtype: torch.dtype,
        towers: TowersConfig | None = None,
        offload: bool = False,
    ) -> None:
        self.model, self._towers = model, towers or TowersConfig()
        self._settings, self._dtype = optimizer, dtype
        bf16 = dtype == torch.bfloat16
        self._divided = parallel.layout().distributed_optimizer
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=bf16, use_distributed_optimizer=self._divided)
        self.wrapped: list[Any] = [DistributedDataParallel(model.config, ddp, part) for _, part in model.named_parts()]
        """The parts of the model, each with the buffers of its gradients."""
        for part in self.wrapped:
            part.broadcast_params()
        self.offload, self._host = offload, HostMemory()
        """Whether the optimizer's state is in the machine's memory but for the update itself."""
        self.optimizer: Any = self._make_optimizer()
        _check_optimizers(self.optimizer)
        config: Any = model.config
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = lambda loss: self.optimizer.scale_loss(loss)
        self._schedule = get_forward_backward_func()

    def _make_optimizer(self) -> Any:
        optimizer, bf16 = self._settings, self._dtype == torch.bfloat16
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            clip_grad=optimizer.clip_grad,
            bf16=bf16,
            params_dtype=self._dtype,
            use_distributed_optimizer=self._divided,
        )
        made: Any = get_megatron_optimizer(settings, self.wrapped, own_groups(settings, self._towers))
        for group in made.param_groups:
            group["fused"] = True
        return made

    def reset_optimizer(self) -> None:
        """Forget the moments: after another kind of training they would hold the first steps of the next kind back.

        AdamW divides by the root of past squared gradients. Those of a supervised warm-up are many times larger than those
        of the policy gradient, and with beta2 = 0.99 they shrink its steps for hundreds of updates.
        """
        self._host.give_back()
        self.optimizer = self._make_optimizer()

    @contextmanager
    def optimizer_here(self) -> Iterator[None]:
        """Inside the block the optimizer's state is on the device, where it may be in the machine's memory otherwise.

        After an error it stays on the device, as the block may have left it in pieces.
        """
        self._host.give_back()
        yield
        if self.offload:
            self._host.take(optimizer_tensors(self.optimizer), but=self.model.parameters())

    def held(self) -> list[Tensor]:
        """All tensors that are kept from step to step: weights, gradients and the optimizer's."""
        return [*self.model.parameters(), *self.model.buffers(), *gradients(self.wrapped), *optimizer_tensors(self.optimizer)]

    def accumulate(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> list[Any]:
        """Compute the gradients of one update: forward and backward over every forest, then the mean over all ranks' tokens.

        Args:
            micro_batches: at least one, a multiple of the stages of an interleaved pipeline; every stage is given the same
                forests. Where experts are divided, all ranks have the same number.
            loss: of one of them.

        Returns:
            What `loss` returned beside its sums, per forest; nothing but on the last pipeline stage.
        """
        for part in self.wrapped:
            part.zero_grad_buffer()
        self.optimizer.zero_grad()
        _set_mode(self.model, training=True)

        def forward_step(data: Iterator[int], part: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(data)
            hidden = part(micro_batches[number])

            def loss_function(output: Tensor) -> tuple[Tensor, Tensor, Any]:
                total, count, rest = loss(part.module.predictions(output), number)
                return total, torch.tensor(count, dtype=torch.int, device=total.device), rest

            return hidden, loss_function

        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(range(len(micro_batches))) for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=len(micro_batches),
            seq_length=len(micro_batches[0].ids),  # of no effect: each micro-batch has its own length
            micro_batch_size=1,
            forward_only=False,
        )

    def check_gradient(self) -> None:
        """Look at the accumulated gradients; nothing is changed.

        Raises:
            TrainingError: they are not finite, on any rank. All ranks raise it.
        """
        with parallel.together():
            if not all(torch.isfinite(buffer.norm()) for buffer in gradients(self.wrapped)):
                raise TrainingError("the gradient is not finite; the weights were not updated")

    def step(self, lr: float) -> float:
        """Clip and apply the accumulated gradients.

        Returns:
            The norm of the gradients before clipping.

        Raises:
            TrainingError: they are not finite; the weights stay as they are.
        """
        self.check_gradient()
        for group in self.optimizer.param_groups:
            group["lr"] = rate_of(group, lr, self._towers, self._settings.lr)
        with self.optimizer_here():
            _, norm, _ = self.optimizer.step()
        return float(norm)


@torch.no_grad()
def forward(model: RankModel, micro_batches: Sequence[MicroBatch], take: Callable[[Predictions, int], None]) -> None:
    """Compute what is predicted at the rows of some forests, without gradient.

    Args:
        model: of this rank.
        micro_batches: as for `MegatronTrainer.accumulate`.
        take: gets the predictions and the micro-batch's number; it is called on the last pipeline stage only.
    """
    _set_mode(model, training=False)
    parts: list[Any] = [part for _, part in model.named_parts()]
    if model.config.pipeline_model_parallel_size == 1:
        for number, micro in enumerate(micro_batches):
            take(parts[0].predictions(parts[0](micro)), number)
        return

    def forward_step(data: Iterator[int], part: ForestModel) -> tuple[Tensor, Callable[..., Any]]:
        number = next(data)

        def collect(output: Tensor, non_loss_data: bool = True) -> None:
            take(part.predictions(output), number)

        return part(micro_batches[number]), collect

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(range(len(micro_batches))) for _ in parts],
        model=parts,
        num_microbatches=len(micro_batches),
        seq_length=len(micro_batches[0].ids),
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )


def _set_mode(model: RankModel, training: bool) -> None:
    if model.training != training:  # walks all modules
        model.train(training)


def _check_optimizers(optimizer: Any) -> None:
    """Refuse, on all ranks, a layout in which a rank has an optimizer without parameters that could not be saved.

    Raises:
        ConfigError: a rank would train nothing with a divided optimizer, or nothing but experts that are divided.
    """
    parts, layout = optimizer.chained_optimizers, parallel.layout()
    none = parts[0].optimizer is None
    empty = none or not any(group["params"] for group in parts[0].optimizer.param_groups)
    idle = (none and len(parts) > 1) or (empty and layout.distributed_optimizer)
    idle_ranks = [found for found in parallel.gather((len(parts) > 1, parallel.stage()) if idle else None) if found]
    if any(experts for experts, _ in idle_ranks):
        raise ConfigError(
            f"layout {layout}: with layout.ep above 1 every process must train something beside experts; add 'attention' to "
            "lora.targets, or take layout.ep = 1"
        )
    if idle_ranks:
        raise ConfigError(
            f"layout {layout}: stage {idle_ranks[0][1]} has nothing to train, and a divided optimizer needs something on every "
            "stage; train more (lora.targets, towers), or take layout.distributed_optimizer = False"
        )
