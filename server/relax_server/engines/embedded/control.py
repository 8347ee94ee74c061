"""What changes the engine while it runs: pausing, weight updates, giving memory back."""

from __future__ import annotations

import time

import torch

from relax_server.engines.base import PauseMode
from relax_server.engines.embedded import weights
from relax_server.engines.embedded.core import RequestError
from relax_server.engines.embedded.scheduler import Scheduler
from relax_server.timeline import Timeline

TAGS = frozenset({"kv_cache", "weights"})
"""What `release` and `restore` can name, as in SGLang."""


class Control:
    """Commands for the model thread. `paused` and `refusal` may be read by any thread."""

    def __init__(self, scheduler: Scheduler, timeline: Timeline | None = None) -> None:
        self.scheduler = scheduler
        self.timeline = timeline or Timeline(None, "engine")
        self.paused = False
        self.refusal: str | None = None
        """Why nothing can be generated now, or None."""
        self._released: set[str] = set()
        self._weights_undefined = False
        self._paused_at = 0.0

    def pause(self, mode: PauseMode) -> None:
        """Stop stepping. `abort` ends all requests, `retract` drops their keys and values, `in_place` keeps them."""
        if not self.paused:
            self._paused_at = time.time()
        self.paused = True
        if mode == "abort":
            self.scheduler.abort(None, "aborted by pause_generation")
        elif mode == "retract":
            self.scheduler.retract_all()

    def resume(self) -> None:
        if self.paused:
            self.timeline.add("paused", self._paused_at, time.time(), lane=1)
        self.paused = False

    @property
    def weights_undefined(self) -> bool:
        """Whether the memory of the weights was taken again, and nothing was loaded into it since."""
        return self._weights_undefined

    def update_weights(
        self, tensors: dict[str, torch.Tensor], version: str | None, flush: bool, abort_all: bool, whole: bool = True
    ) -> int:
        """Copy new values in; returns how many sequences were held by a pause.

        Media embeddings are always forgotten, since they come from the old towers. Sequences that generate go on with the
        keys and values they have; what they generate from now on carries the new version. Prompts that are half computed
        are computed again, so that no prompt is of two versions.

        Args:
            tensors: from `models.weight_files.read_weights`.
            version: what new tokens carry; None keeps the present one.
            flush: whether cached prefixes are forgotten too; without it they, and the first half of a prompt, stay as the
                old weights computed them.
            abort_all: whether all requests are ended first.
            whole: whether the tensors are all of the model's; otherwise the others stay as they are.

        Raises:
            ConfigError: not weights of this model; nothing was changed.
            RequestError: the weights' memory is released, or some would stay undefined.
        """
        self.require_weights()
        if self._weights_undefined and not whole:
            raise RequestError("the memory of the weights was released meanwhile; load them once more")
        began = time.time()
        scheduler = self.scheduler
        pairs = weights.assign(scheduler.runner.model, tensors, whole)
        if abort_all:
            scheduler.abort(None, "aborted by a weight update")
        weights.copy(pairs)
        if version is not None:
            scheduler.weight_version = version
        scheduler.embeddings.flush()
        if flush:
            scheduler.flush_cache()
            scheduler.restart_prefills()
        scheduler.stats.weight_updates += 1
        self.timeline.add("update weights", began, time.time(), version=scheduler.weight_version)
        self._weights_undefined = False
        self._refresh()
        return len(scheduler.running) + len(scheduler.waiting) if self.paused else 0

    def require_weights(self) -> None:
        if "weights" in self._released:
            raise RequestError("the memory of the weights is released; call resume_memory_occupation first")

    def release(self, tags: frozenset[str]) -> None:
        """Give memory back.

        Raises:
            RequestError: unknown tag, or requests are in flight.
        """
        self._check(tags)
        scheduler = self.scheduler
        if scheduler.has_work:
            n = len(scheduler.running) + len(scheduler.waiting)
            raise RequestError(f"{n} sequences are in flight; abort them or let them finish before releasing memory")
        scheduler.flush_cache()
        if "kv_cache" in tags - self._released:
            scheduler.pool.drop_memory()
        if "weights" in tags - self._released:
            scheduler.runner.drop_weights()
            self._weights_undefined = True
        self._released |= tags
        self._refresh()

    def restore(self, tags: frozenset[str]) -> None:
        """Take memory again; weights are undefined until they are updated.

        Raises:
            RequestError: unknown tag.
        """
        self._check(tags)
        if "kv_cache" in tags & self._released:
            self.scheduler.pool.allocate_memory()
        if "weights" in tags & self._released:
            self.scheduler.runner.allocate_weights()
        self._released -= tags
        self._refresh()

    def _check(self, tags: frozenset[str]) -> None:
        if not tags <= TAGS:
            raise RequestError(f"unknown tags {sorted(tags - TAGS)}; known are {sorted(TAGS)}")

    def _refresh(self) -> None:
        if self._released:
            self.refusal = f"the engine's memory is released ({', '.join(sorted(self._released))}); resume it first"
        elif self._weights_undefined:
            self.refusal = "memory was resumed but no weights were loaded since; call update_weights_from_disk first"
        else:
            self.refusal = None
