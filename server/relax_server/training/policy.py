"""The policy being trained: a model folder in, training steps on groups of episodes, weights and checkpoints out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_sdk.config import AlgorithmConfig, OptimizerConfig, SamplingParams, TrainingConfig
from relax_sdk.errors import TrainingError
from relax_sdk.trajectory import Group, Sample
from relax_sdk.tuning import Tuning
from relax_server.machine_limits import limits_told
from relax_server.models.adapter_files import fingerprint
from relax_server.training.algorithms import find
from relax_server.training.anchor import KeptReference
from relax_server.training.batch import ReadMedia, TokenBatch, make_batch
from relax_server.training.forest import Forest
from relax_server.training.group_fields import Given, by_turn, flat_logprobs
from relax_server.training.megatron import checkpoint, folder, parallel
from relax_server.training.megatron.adapter_folder import publish, reference_values
from relax_server.training.megatron.host_memory import HostMemory
from relax_server.training.megatron.saving import Saving
from relax_server.training.megatron.trainer import MegatronTrainer
from relax_server.training.metrics import StepMetrics
from relax_server.training.model import LogprobModel
from relax_server.training.objective import LossSum, Targets, cross_entropy, policy_objective
from relax_server.training.routes import sample_routes
from relax_server.training.samples import collect, token_advantages
from relax_server.training.schedule import Schedule
from relax_server.training.scoring import Predictions
from relax_server.training.step_tokens import StepTokens

MAY_CHANGE = ("lr", "warmup_steps", "decay", "min_lr_ratio", "clip_grad")
"""Settings of the optimizer that may be others where a run goes on."""


class PolicyModel(LogprobModel):
    """A model, its optimizer and the algorithm that trains it.

    Args:
        model_path: a Hugging Face folder.
        algorithm: advantages, loss and corrections.
        optimizer: AdamW and the learning-rate schedule.
        training: token budget, sharing, precision, threads.
        total_steps: steps of the whole run, for the learning-rate schedule.
        seed: for torch's generators.
        features: folder in shared memory where media features are exchanged with other processes.
        sampling: how tokens are sampled: logits are divided by its temperature, and cut by its `top_p` and `top_k`, alike.
        own_reference: False keeps no reference: its logprobs are given to every step that needs them.
        tuning: what is trained; None: everything.
        publish_adapters: `export_weights` writes adapters alone, for engines that merge them.
        takes_turns: engines generate on the same devices while this policy waits, see `park`.

    Raises:
        ConfigError: the model cannot be trained, or a setting does not fit it.
        OutOfMemory: the machine or the device has no memory left for weights, gradients, optimizer or reference.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
        total_steps: int,
        seed: int,
        sampling: SamplingParams | None = None,
        features: Path | None = None,
        own_reference: bool = True,
        tuning: Tuning | None = None,
        publish_adapters: bool = False,
        takes_turns: bool = False,
    ) -> None:
        super().__init__(model_path, training=training, seed=seed, sampling=sampling, features=features, tuning=tuning)
        self.publish_adapters = publish_adapters
        self._base = fingerprint(self.model_path) if publish_adapters else ""
        self.algorithm, self.optimizer_config, self.total_steps = algorithm, optimizer, total_steps
        self.schedule = Schedule.of(optimizer, total_steps)
        self.step = 0
        """Training steps done."""
        self.updates_taken = 0
        """Updates of the training step that was begun last; the weights have changed although it failed if there were any."""
        self.spans: list[tuple[str, float, float]] = []
        """Stages of the last training step: name, begin and end in seconds since the epoch."""
        self.saving: Saving | None = None
        """The checkpoint that is being written."""
        self.tokens: StepTokens | None = None
        """What the last training step computed for each trained token; None before the first."""
        offload = training.offload
        if offload == "auto":
            offload = "all" if takes_turns and self.device.type == "cuda" else "none"
        self.parks = offload == "all"
        """Whether `park` gives memory of the device free."""
        self._host = HostMemory()
        with limits_told("gradients and optimizer cannot be allocated", self.model_path):
            self.trainer = MegatronTrainer(
                self._loaded.model, optimizer, self._dtype, self.tuning.towers, offload=offload == "optimizer"
            )
        self._objective = policy_objective(algorithm)
        find("advantage", algorithm.advantage)  # before the first batch needs it
        self._aggregate = find("aggregation", algorithm.aggregation)
        self._compares = bool(algorithm.kl_coef) and own_reference
        self._reference: KeptReference | None = None
        self._set_reference()

    # ---------------------------------------------------------------------------------------------------- training

    def warmup_step(self, samples: Sequence[Sample], media: ReadMedia, lr: float) -> float:
        """One supervised step: cross entropy on the tokens with loss mask 1. Does not count as a training step.

        Returns:
            The loss of the step, the mean over those tokens.

        Raises:
            TokenError: tokens and media do not fit together.
        """
        features = self._features(samples, media)
        with parallel.together():
            batch = make_batch(samples, self.processor, features)
        targets = self._targets(batch)
        mine = self._with_media(self._mine(self._pack(batch)), samples, media)
        results = self._accumulate(mine, cross_entropy, targets)
        self.trainer.step(lr)
        return parallel.sum_over_ranks([float(sum(r["loss"] for r in results if r))])[0] / len(batch.trained)

    def end_warmup(self) -> None:
        """Go over from the warm-up to reinforcement learning: fresh moments, and the KL reference is what was reached."""
        self.trainer.reset_optimizer()
        self._set_reference()

    def train_step(
        self, groups: Sequence[Group], media: ReadMedia, version: int, given: Given | None = None
    ) -> dict[str, float]:
        """One step of reinforcement learning on a batch of groups; every data-parallel rank is given the same batch.

        Args:
            groups: complete groups; a trajectory without turns has no sample, but its reward counts in its group. One that
                failed has no reward, and is left out.
            media: reads the bytes of a media item.
            version: number of the weights before this step, for the staleness.
            given: what other roles have computed of these groups; None: it is computed here.

        Returns:
            Metrics, see `StepMetrics`.

        Raises:
            TrainingError: no trajectory has a token to train on, the gradient is not finite, what is given does not fit the
                groups, or the reference's logprobs are to be given and are not.
            TokenError: tokens and media do not fit together.
            MediaError: a media item is damaged or missing.
            OutOfMemory: the machine or the device has no room for it.
        """
        with limits_told("a training step does not fit", self.model_path):
            return self._train_step(groups, media, version, given)

    def _train_step(self, groups: Sequence[Group], media: ReadMedia, version: int, given: Given | None) -> dict[str, float]:
        metrics = StepMetrics()
        self.spans, self.updates_taken = metrics.spans, 0
        parts, targets, tokens = self._prepare(groups, media, version, given, metrics)
        lr = self.schedule.at(self.step)
        for number, mine in enumerate(parts):
            with metrics.seconds("forward_backward"):
                results = self._accumulate(mine, self._objective, targets)
            told = [(forest, result) for forest, result in zip(mine, results, strict=bool(results)) if result]
            metrics.update([result for _, result in told])
            for forest, result in told:
                before = _entries(targets.recomputed, forest)
                tokens.take(forest, result, result["logprobs"] if number == 0 else before)
            with metrics.seconds("optimizer"):
                metrics.stepped(self.trainer.step(lr), lr)
            self.updates_taken += 1
        self.step += 1
        tokens.gather()
        self.tokens = tokens
        return metrics.result(tokens)

    def attempt(self, group: Group, media: ReadMedia, version: int, given: Given | None = None) -> None:
        """Do all of a training step with one group alone, but for the step: the weights stay as they are.

        Args:
            group: one that has a token to train on; another one passes.
            media, version, given: as for `train_step`, `given` of this group alone.

        Raises:
            TrainingError, TokenError, MediaError: as `train_step` with this group; so the group is to blame.
        """
        if not any(trajectory.n_response_tokens for trajectory in group.counted):
            return
        parts, targets, _ = self._prepare([group], media, version, given, StepMetrics())
        for mine in parts:
            self._accumulate(mine, self._objective, targets)
            self.trainer.check_gradient()

    # ------------------------------------------------------------------------------------------------------------- memory

    def park(self) -> None:
        """Move all that is kept from step to step to the machine's memory, if the policy `parks`; nothing can be computed then.

        Raises:
            OutOfMemory: the machine has no room for it.
        """
        if self.parks:
            kept = self._reference.tensors if self._reference is not None else []
            with limits_told("the trainer's state cannot be moved to the machine's memory", self.model_path):
                self._host.take([*self.trainer.held(), *kept])
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()

    def unpark(self) -> None:
        """Take back what `park` has moved; without effect where it has not.

        Raises:
            OutOfMemory: the device has no room: engines have not given theirs back.
        """
        with limits_told("the trainer's state does not fit beside the engines", self.model_path):
            self._host.give_back()

    # --------------------------------------------------------------------------------------------- weights, checkpoints

    def export_weights(self, folder_: Path) -> None:
        """Write only `model.safetensors`, or `adapters.safetensors` (`publish_adapters`), under another name first, so that a
        reader never sees half a file.

        Raises:
            DiskFull: no room for it.
        """
        if self.publish_adapters:
            publish(self._loaded, self.tuning.lora, self._base, Path(folder_))
        else:
            folder.write_weights(self._loaded.hf_weights(), Path(folder_))

    def load_reference(self, folder_: Path) -> None:
        """Take the KL reference from a model folder: that of a run which goes on is not the model it was begun with if there
        was a warm-up.

        Raises:
            ConfigError: not a folder of this model.
        """
        if self._compares:
            path = Path(folder_)
            values = reference_values(self._loaded.model, path, lambda: self._load_model(path).model)
            self._set_reference(values)

    def identity(self) -> dict[str, Any]:
        """Settings that a checkpoint must share to be continued: all that its weights, moments and numbers follow from.

        The learning rate and its schedule may change (`Schedule.going_on`), and the bound of the gradient's norm.
        """
        return {
            **self.model_identity(),
            "algorithm": dataclasses.asdict(self.algorithm),
            "optimizer": {k: v for k, v in dataclasses.asdict(self.optimizer_config).items() if k not in MAY_CHANGE},
            "training": {"dtype": self.training.dtype, "replay_routes": self.training.replay_routes},
            "sampling": {name: getattr(self.sampling, name) for name in ("temperature", "top_p", "top_k")},
        }

    def save(self, folder_: Path, meta: dict[str, Any]) -> None:
        """Write a checkpoint: model, optimizer, step, generators and `meta` (plain data).

        Raises:
            CheckpointError: `meta` is not plain data.
            DiskFull, OutOfMemory, TrainingError: the machine refuses; see `checkpoint.begin`.
        """
        self.begin_save(folder_, meta, waits=True)
        self.finish_save()

    def begin_save(self, folder_: Path, meta: dict[str, Any], waits: bool = False) -> None:
        """Take what a checkpoint holds as it is now, and begin to write it; `finish_save` must be called before the next one.

        Args:
            folder_: of the checkpoint; it is there when all is written.
            meta: plain data.
            waits: nothing is trained before `finish_save`, so that nothing need be copied.

        Raises:
            CheckpointError, DiskFull, OutOfMemory, TrainingError: as `save`.
        """
        kept = {"schedule": self.schedule.to_dict(), "meta": meta}
        self.saving = checkpoint.begin(
            Path(folder_), self.trainer, identity=self.identity(), step=self.step, meta=kept, waits=waits
        )

    def finish_save(self) -> None:
        """Wait until the checkpoint is written that was begun, on all ranks.

        Raises:
            DiskFull, OutOfMemory, TrainingError: as `save`.
        """
        if self.saving is not None:
            saving, self.saving = self.saving, None
            saving.finish()

    def load(self, folder_: Path) -> dict[str, Any]:
        """Continue from a checkpoint; the steps that follow are those of an uninterrupted run, bit for bit.

        Where the learning rate's settings or the number of steps have changed, the rate goes on from where it was.

        Returns:
            `meta` as it was saved.

        Raises:
            CheckpointError: missing, damaged, or of another model or configuration; the differences are named.
        """
        self.step, kept = checkpoint.load(Path(folder_), self.trainer, identity=self.identity())
        self.schedule = Schedule.from_dict(kept["schedule"]).going_on(self.optimizer_config, self.total_steps, self.step)
        return kept["meta"]

    # ----------------------------------------------------------------------------------------------------- inner works

    def _set_reference(self, values: Mapping[str, Tensor] | None = None) -> None:
        """Keep the model as it is now, or other values of its parameters, if they are compared with here."""
        if self._compares:
            with limits_told("the KL reference cannot be allocated", self.model_path):
                self._reference = KeptReference(self._loaded.model, values)

    def _prepare(
        self, groups: Sequence[Group], media: ReadMedia, version: int, given: Given | None, metrics: StepMetrics
    ) -> tuple[list[list[Forest]], Targets, StepTokens]:
        """All of a step that comes before its first update.

        Returns:
            This rank's forests by update, what they are trained on, and what becomes the batch's account by token.
        """
        with parallel.together(), metrics.seconds("plan"):
            own = given.advantages if given is not None else None
            advantages = [by_turn(g, a) for g, a in zip(groups, own, strict=True)] if own is not None else None
            collected = collect(groups, self.algorithm, advantages)
            if not collected.samples:
                raise TrainingError(f"none of {len(groups)} groups has a token to train on")
        with metrics.seconds("features"):
            features = self._features(collected.samples, media)
        with parallel.together(), metrics.seconds("plan"):
            pairs = zip(collected.trajectories, collected.samples, strict=True)
            routes = [sample_routes(t, s) for t, s in pairs] if self.training.replay_routes else []
            batch = make_batch(collected.samples, self.processor, features, routes)
            split = collected.split(self.algorithm.updates_per_batch)
            parts = [self._pack(batch, part) for part in split]
            metrics.describe(collected, batch, parts, version)
            by_token = token_advantages(collected, batch.trained)
            targets = self._targets(batch, by_token, self._scale(batch, split))
            mine = [self._mine(forests) for forests in parts]
        with metrics.seconds("features"):
            mine = [self._with_media(forests, collected.samples, media) for forests in mine]
        with metrics.seconds("logprobs"):
            targets = self._before(mine, targets, given.ref_log_probs if given is not None else None)
        return mine, targets, StepTokens(collected, batch, by_token)

    def _scale(self, batch: TokenBatch, split: Sequence[Sequence[int]]) -> np.ndarray:
        """The weight of each trained token in its update, float32 [n]."""
        scale = np.empty(len(batch.trained), np.float32)
        for part in split:
            own = np.isin(batch.trained.sample, np.asarray(part))
            scale[own] = self._aggregate(torch.from_numpy(batch.trained.sample[own])).numpy()
        return scale

    def _accumulate(self, mine: Sequence[Forest], objective: Any, targets: Targets) -> list[dict[str, Tensor]]:
        """Add up the gradients of the mean loss over all ranks' forests.

        Args:
            mine: of this rank, as `_mine` returns them.
            objective: the loss of a forest.
            targets: of the batch.

        Returns:
            The results of each of these forests, with nothing for one without trained tokens; no item at all before the last
            pipeline stage.
        """

        def loss(predictions: Predictions, number: int) -> LossSum:
            if not len(mine[number].entry):
                return 0.0 * predictions.hidden.sum(), 0, {}
            return objective(predictions, mine[number], targets)

        return self.trainer.accumulate(self._micro_batches(mine), loss)

    def _before(self, mine: Sequence[Sequence[Forest]], targets: Targets, reference: Sequence[np.ndarray] | None) -> Targets:
        """Add what has to be computed before the first update: the policy's own logprobs, and the reference's."""
        every = [forest for forests in mine for forest in forests]
        if self.algorithm.old_logprobs == "recompute" and len(mine) > 1:
            targets = dataclasses.replace(targets, recomputed=self._forward(every, targets))
        if reference is not None:
            return dataclasses.replace(targets, reference=self._tensor(flat_logprobs(reference, len(targets.token))))
        if self._reference is not None:
            with self._reference.in_place():
                unrouted = [dataclasses.replace(forest, routes=None) for forest in every]  # a reference has routes of its own
                return dataclasses.replace(targets, reference=self._forward(unrouted, targets))
        if self.algorithm.kl_coef:
            raise TrainingError("this policy keeps no reference, and its logprobs were not given to the step")
        return targets


def _entries(values: Tensor | None, forest: Forest) -> Tensor | None:
    """The values of a forest's trained tokens."""
    return None if values is None else values[torch.from_numpy(forest.entry).to(values.device)]
