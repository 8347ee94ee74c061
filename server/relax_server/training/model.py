"""A model folder as a Megatron model that says how likely tokens are: what the policy and its frozen reference share.

On CPU a model, once made, has torch patched for the whole process (see `megatron.cpu`), so it lives in a process of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from relax_sdk.config import SamplingParams, TrainingConfig
from relax_sdk.errors import ConfigError
from relax_sdk.media import MediaKey
from relax_sdk.model_export import SHARD_SIZE
from relax_sdk.trajectory import Group, Sample
from relax_sdk.tuning import Tuning
from relax_server.machine_limits import limits_told
from relax_server.models.adapter_files import fingerprint
from relax_server.models.device import this_device
from relax_server.models.processor import MediaFeatures, Processor
from relax_server.training.batch import ReadMedia, TokenBatch, distinct_media, make_batch, outlined, prepared
from relax_server.training.forest import Forest, pack
from relax_server.training.forest_parts import STRIPE, cost, deal, nothing, padded, share
from relax_server.training.megatron import checkpoint, folder, parallel
from relax_server.training.megatron.build import Loaded, load_model
from relax_server.training.megatron.micro_batch import MicroBatch
from relax_server.training.megatron.peft_folder import peft_writer
from relax_server.training.megatron.trainer import forward
from relax_server.training.objective import Targets, token_scores
from relax_server.training.scoring import Predictions


class LogprobModel:
    """A model without gradients.

    Args:
        model_path: a Hugging Face folder.
        training: token budget, sharing, precision, threads.
        seed: for torch's generators.
        features: folder in shared memory where media features are exchanged with other processes.
        sampling: how tokens are sampled: logits are divided by its temperature, and cut by its `top_p` and `top_k`, alike.
        tuning: what is trained of it, which decides what a checkpoint of it holds; None: everything.

    Raises:
        ConfigError: the model cannot be had in Megatron, or a setting does not fit it.
        OutOfMemory: the machine or the device has no memory left for it.
    """

    def __init__(
        self,
        model_path: Path,
        *,
        training: TrainingConfig,
        seed: int,
        sampling: SamplingParams | None = None,
        features: Path | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self.tuning, self._seed = tuning or Tuning(), seed
        self.sampling = sampling = sampling if sampling is not None else SamplingParams()
        if sampling.temperature <= 0:
            raise ConfigError(f"temperature = {sampling.temperature}; allowed: above 0 (greedy samples cannot be trained on)")
        torch.set_num_threads(training.threads)
        parallel.initialize(seed=seed)
        self.model_path = Path(model_path)
        self.training = training
        self.processor = Processor.load(self.model_path, features)
        self._dtype = torch.bfloat16 if training.dtype == "bfloat16" else torch.float32
        self.device = this_device(self._dtype)
        self._loaded = self._load_model(self.model_path)
        self._banned = torch.tensor(self.processor.banned_ids, dtype=torch.long, device=self.device)
        if training.replay_routes and not any(self._loaded.model.moe_layers):
            raise ConfigError("TrainingConfig.replay_routes = True, but the model has no mixture of experts")

    def logprobs(self, samples: Sequence[Sample], media: ReadMedia) -> list[np.ndarray]:
        """Compute log probabilities under the current weights, float32, one array per sample with one number per mask-1 token.

        A mixture of experts chooses its experts itself; routes that an engine has recorded are for training only.

        Args:
            samples: at least one.
            media: reads the bytes of a media item.

        Raises:
            TokenError: tokens and media do not fit together.
        """
        features = self._features(samples, media)
        with parallel.together():
            batch = make_batch(samples, self.processor, features)
        targets = self._targets(batch)
        mine = self._with_media(self._mine(self._pack(batch)), samples, media)
        flat = parallel.known_on_any_rank(self._forward(mine, targets).cpu().numpy())
        cuts = np.searchsorted(batch.trained.sample, np.arange(1, len(batch)))
        return np.split(flat, cuts)

    def group_logprobs(self, groups: Sequence[Group], media: ReadMedia) -> list[np.ndarray]:
        """Compute the field `ref_log_probs` of each group, see `training.group_fields`.

        A mixture of experts chooses its experts itself.

        Raises:
            TokenError: tokens and media do not fit together.
        """
        samples = [(index, s) for index, group in enumerate(groups) for t in group.counted for s in t.samples()]
        parts: list[list[np.ndarray]] = [[np.zeros(0, np.float32)] for _ in groups]
        if samples:
            found = self.logprobs([sample for _, sample in samples], media)
            for (index, _), values in zip(samples, found, strict=True):
                parts[index].append(values)
        return [np.concatenate(part) for part in parts]

    def model_identity(self) -> dict[str, Any]:
        """Say which model this is, as plain data: the part of a checkpoint's identity that its weights follow from."""
        config = self.processor.hf_config.to_dict()
        own = {key: v for key, v in config.items() if key not in ("_name_or_path", "transformers_version")}
        base = fingerprint(self.model_path) if self.tuning.keeps_weights else None
        return {"model": own, **self.tuning.identity(), "base_weights": base}

    def restore_weights(self, folder_: Path) -> int:
        """Take the weights of a checkpoint, and nothing else of it.

        Returns:
            The training steps that are in them.

        Raises:
            CheckpointError: missing, damaged, or of another model.
            OutOfMemory, TrainingError: the machine refuses; see `checkpoint.load`.
        """
        return checkpoint.load_model(Path(folder_), self._loaded.model, identity=self.model_identity())

    def export(self, folder_: Path, shard_size: int = SHARD_SIZE) -> list[str]:
        """Write a whole model folder that transformers' `from_pretrained` reads, in place of one that is there.

        Adapters are merged into its weights, and are in PEFT's format in its folder `adapter` as well.

        Returns:
            Names of the files that hold the weights.

        Raises:
            DiskFull: no room for it.
        """
        also = peft_writer(self._loaded, self.tuning.lora, self.model_path) if self.tuning.has_lora else None
        return folder.write_folder(self.model_path, self._loaded.folder_weights(), Path(folder_), shard_size, also)

    # ----------------------------------------------------------------------------------------------------- inner works

    def _load_model(self, path: Path) -> Loaded:
        with limits_told("the model cannot be loaded", path):
            return load_model(
                path,
                self.processor.hf_config,
                dtype=self._dtype,
                device=self.device,
                recompute=self.training.recompute,
                attention=self.training.attention,
                experts=self.training.experts,
                tuning=self.tuning,
                seed=self._seed,
            )

    def _targets(self, batch: TokenBatch, advantages: np.ndarray | None = None, scale: np.ndarray | None = None) -> Targets:
        """Lay out what the objective needs of every trained token; logprobs need neither advantages nor scale."""
        nothing = np.zeros(len(batch.trained), np.float32)
        return Targets(
            token=self._tensor(batch.trained.target),
            engine=self._tensor(batch.trained.logprob.astype(np.float32)),
            advantage=self._tensor(nothing if advantages is None else advantages),
            scale=self._tensor(nothing if scale is None else scale),
            banned=self._banned,
            sampling=self.sampling,
        )

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _features(self, samples: Sequence[Sample], media: ReadMedia) -> dict[MediaKey, MediaFeatures]:
        """The features of all media of a batch. Several ranks know their outlines only, of which each has made some, until
        `_with_media`.

        Raises:
            MediaError, TokenError: see `read_features`.
        """
        refs, ranks = distinct_media(samples), parallel.layout().ranks
        if ranks == 1:
            return prepared(refs, self.processor, media)
        with parallel.together():
            own = outlined(refs[parallel.rank() :: ranks], self.processor, media)
        return {key: outline for part in parallel.gather(own) for key, outline in part.items()}

    def _with_media(self, mine: Sequence[Forest], samples: Sequence[Sample], media: ReadMedia) -> list[Forest]:
        """Prepare the media of this rank's forests, and of no others; a rank without towers prepares none.

        Raises:
            MediaError: an item is damaged, which its outline did not tell.
        """
        if parallel.layout().ranks == 1:
            return list(mine)
        refs = distinct_media(samples)
        with parallel.together():
            wanted = sorted({int(i) for forest in mine for i in forest.items}) if self._loaded.model.place.first else []
            whole = prepared([refs[i] for i in wanted], self.processor, media)
            if not wanted:
                return list(mine)
            return [dataclasses.replace(f, media=tuple(whole[refs[i].key] for i in f.items)) for f in mine]

    def _pack(self, batch: TokenBatch, only: Sequence[int] | None = None) -> list[Forest]:
        """The forests of a batch; with data parallelism at least one for each rank, if there are as many samples."""
        forests = pack(batch, self.training.token_budget, self.training.share_prompts, only)
        ranks = parallel.data_parallel()[1]
        if len(forests) < ranks and forests:
            part = max(1, -(-sum(map(len, forests)) // ranks))
            forests = pack(batch, min(self.training.token_budget, part), self.training.share_prompts, only)
        return forests

    def _mine(self, forests: Sequence[Forest]) -> list[Forest]:
        """The forests that this rank computes, as it computes them: padded, and cut to its tokens.

        Ranks of the same data-parallel number have the same forests. There is at least one; where experts are divided, every
        rank has as many as the others, and an interleaved pipeline takes a multiple of its stages. Those that are added teach
        nothing.
        """
        layout, (number, ranks) = parallel.layout(), parallel.data_parallel()
        width = self._loaded.model.config.hidden_size
        dealt = deal([cost(forest, width) for forest in forests], ranks)
        mine = [forests[i] for i in dealt[number]]
        wanted = max(1, *map(len, dealt)) if layout.ep > 1 else max(1, len(mine))
        wanted += -wanted % layout.pp if layout.vpp > 1 else 0
        mine += [nothing()] * (wanted - len(mine))
        rank, size = parallel.context_parallel()
        multiple = (layout.tp if layout.sequence_parallel else 1) * (size * STRIPE if size > 1 else 1)
        whole = [padded(forest, multiple) for forest in mine]
        return [share(forest, rank, size) for forest in whole] if size > 1 else whole

    def _micro_batches(self, forests: Sequence[Forest]) -> list[MicroBatch]:
        with parallel.together():
            return [self._loaded.model.micro_batch(forest) for forest in forests]

    def _forward(self, mine: Sequence[Forest], targets: Targets) -> Tensor:
        """Compute the logprobs of the trained tokens of this rank's forests, float32 [n of the batch].

        Returns:
            NaN for tokens of other ranks; and, before the last pipeline stage, for all.
        """
        out = torch.full((len(targets.token),), torch.nan, device=self.device)

        def take(predictions: Predictions, number: int) -> None:
            scores = token_scores(predictions, mine[number], targets)
            out[torch.from_numpy(mine[number].entry).to(self.device)] = scores.logprobs

        forward(self._loaded.model, self._micro_batches(mine), take)
        return out
