"""Continuous batching: a waiting queue, admission by free KV slots, retraction when they run out, one forward a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from relax_server.engines.embedded import attention
from relax_server.engines.embedded.batch import Work, build
from relax_server.engines.embedded.core import Finish, Sequence, Stats
from relax_server.engines.embedded.model import EmbeddingCache, ModelRunner
from relax_server.engines.embedded.prefix_tree import PrefixTree
from relax_server.engines.embedded.sampling import SampledTokens, sample

RESERVE = 8
"""KV slots kept free per running sequence when another is admitted, so that it is not retracted at once."""
EVICT_FRACTION = 16
"""At least one in this many slots is evicted at a time, because finding the oldest prefixes walks the tree."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes and the model's special tokens."""

    capacity: int
    """KV slots: tokens in memory at once."""
    max_running: int = 512
    chunk: int = 2048
    """Prompt tokens computed in one step at most."""
    eos_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    """Never sampled."""
    record_routes: bool = False
    decode: Callable[[list[int]], str] = field(default=lambda ids: "")
    """Tokens to text, for stop strings."""


class Scheduler:
    """Sequences in, tokens out. Every method is called by the model thread."""

    def __init__(self, runner: ModelRunner, config: SchedulerConfig, weight_version: str = "0") -> None:
        self.runner = runner
        self.config = config
        self.pool = runner.new_pool(config.capacity, config.record_routes)
        self.tree = PrefixTree(self.pool)
        self.embeddings = EmbeddingCache()
        self.context_length = min(runner.context_length, config.capacity)
        self.weight_version = weight_version
        self.stats = Stats()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.events: list[Sequence] = []
        """Sequences with news; the loop takes and delivers them."""
        self.epoch = 0
        """Raised by every flush; keys and values of another epoch are never shared."""
        self._eos = frozenset(config.eos_ids)
        self._banned = torch.tensor(config.banned_ids, dtype=torch.int64, device=self.runner.device)
        self._table = np.zeros((config.max_running, self.context_length), np.int64)
        self._rows = list(range(config.max_running - 1, -1, -1))
        self._arrivals = 0

    # ------------------------------------------------------------------------------------------------------- queue

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose `max_tokens` is within `context_length`."""
        self._arrivals += 1
        sequence.arrival = self._arrivals
        self.waiting.append(sequence)

    def abort(self, rid: str | None, message: str = "aborted") -> int:
        """End one request, or all with None, keeping what it has; returns how many sequences that were."""
        ended = [s for s in (*self.running, *self.waiting) if rid is None or s.rid == rid]
        self._end(ended, Finish("abort", message=message))
        self.stats.aborted += len(ended)
        return len(ended)

    def fail(self, message: str) -> None:
        """End every running sequence after a failed step; what the step had promised the cache is forgotten."""
        self.stats.failed += len(self.running)
        self.flush_cache()
        self._end(list(self.running), Finish("abort", message=message, status=500))

    def _end(self, ended: list[Sequence], finish: Finish) -> None:
        for sequence in ended:
            self._finish(sequence, finish)
        self.running = [s for s in self.running if s.finish is None]
        self.waiting = deque(s for s in self.waiting if s.finish is None)

    def retract_all(self) -> None:
        """Put every running sequence back into the queue; its keys and values are computed again later."""
        for sequence in sorted(self.running, key=lambda s: -s.arrival):
            self._retract(sequence)

    def restart_prefills(self) -> None:
        """Begin anew with what is half computed: the weights have changed, and the rest would be of other ones.

        A sequence that generates keeps its keys and values. So those of a prompt are all of one version of the weights: the
        version of the first token that was sampled after them.
        """
        half = [s for s in self.running if not s.out_ids or len(s) - s.computed > 1]  # where it generates, the newest is left
        for sequence in sorted(half, key=lambda s: -s.arrival):
            self._retract(sequence)

    def flush_cache(self) -> None:
        """Forget all cached prefixes and media embeddings; running sequences keep their own keys and values."""
        self.tree.flush()
        self.embeddings.flush()
        self.epoch += 1

    # -------------------------------------------------------------------------------------------------------- step

    def step(self) -> None:
        """One forward over decoding sequences and prompt chunks, and one new token for each that is complete."""
        began = time.perf_counter()
        work = self._continue()
        self._admit(work)
        if not work:
            raise RuntimeError(f"nothing can run: {len(self.waiting)} waiting, {self.pool.n_free} KV slots free")
        batch = build(work, self._table, self.runner, self.embeddings, self.stats)
        layout = attention.plan(batch.spans, self._table, self.pool, self.runner.heads // self.runner.kv_heads)
        started = time.perf_counter()
        hidden = self.runner.forward(batch.ids, batch.positions, layout, batch.media)
        for item in work:
            item.sequence.computed = item.start + item.n
        if batch.sampled:
            logits = self.runner.logits(hidden[torch.from_numpy(batch.sample_rows).to(hidden.device)])
            logits = logits[torch.from_numpy(batch.logit_rows).to(hidden.device)]
            self.stats.forward_seconds += time.perf_counter() - started
            self._commit(batch.sampled, self._sample(batch.sampled, logits))
        self.stats.steps += 1
        self.stats.step_seconds += time.perf_counter() - began

    def _sample(self, sequences: list[Sequence], logits: torch.Tensor) -> SampledTokens:
        n = len(sequences)
        seeds = np.fromiter((s.seed for s in sequences), np.uint64, n)
        indices = np.fromiter((len(s.out_ids) for s in sequences), np.uint64, n)
        return sample(logits, [s.sampling for s in sequences], seeds, indices, self._banned)

    def _continue(self) -> list[Work]:
        """Work of the running sequences, its slots taken; retracts the newest ones if there are not enough."""
        while True:
            budget, plan = self.config.chunk, []
            for sequence in self.running:
                n = len(sequence) - sequence.computed
                if n > 1:
                    n = min(n, budget)
                    budget -= n
                if n:
                    plan.append(Work(sequence, sequence.computed, n))
            if self._free_up(sum(w.n for w in plan), alone=len(self.running) == 1):
                break
            self._retract(max(self.running, key=lambda s: s.arrival))
        slots, at = self.pool.allocate(sum(w.n for w in plan)), 0
        for item in plan:
            sequence = item.sequence
            sequence.held = item.start + item.n
            self._table[sequence.row, item.start : sequence.held] = slots[at : at + item.n]
            at += item.n
            if item.n > 1 and sequence.epoch == self.epoch:
                self._remember(sequence, sequence.held)
        return plan

    def _admit(self, work: list[Work]) -> None:
        """Move sequences from the queue into the batch while slots, rows and the chunk budget last.

        A prefix counts as known as soon as it is part of this very forward, since all rows write their keys and values
        before any row reads; so equal prompts that arrive together are computed once.
        """
        budget = self.config.chunk - sum(w.n for w in work if w.n > 1)
        complete = {
            w.sequence.prompt.digest: w
            for w in work
            if not w.sequence.out_ids and w.is_complete and w.sequence.epoch == self.epoch
        }
        while self.waiting and self._rows and budget > 0:
            sequence = self.waiting[0]
            twin = None if sequence.out_ids else complete.get(sequence.prompt.digest)
            item = self._place(sequence, budget) if twin is None else self._share(sequence, twin)
            if item is None:
                break
            self.waiting.popleft()
            self.running.append(sequence)
            work.append(item)
            budget -= 0 if item.twin else item.n
            if not item.twin and not sequence.out_ids and item.is_complete:
                complete[sequence.prompt.digest] = item

    def _share(self, sequence: Sequence, twin: Work) -> Work | None:
        """Admit a sequence with the same prompt as one that is completed in this step: it shares all slots and logits."""
        if not self._free_up(RESERVE * (len(self.running) + 1)):
            return None
        slots = self._table[twin.sequence.row, : len(sequence.prompt)]
        self.pool.retain(slots)
        self._take_row(sequence, slots)
        return Work(sequence, len(slots), 0, twin)

    def _place(self, sequence: Sequence, budget: int) -> Work | None:
        """Admit a sequence with as many prompt tokens as the budget allows, after the prefix that is known."""
        total = len(sequence)
        keys = self._keys(sequence, total)
        known = self.tree.match(keys[: total - 1])
        self.pool.retain(known)
        n = min(total - len(known), budget)
        if not self._free_up(n + RESERVE * len(self.running), alone=not self.running):
            self.pool.release(known)
            return None
        self._take_row(sequence, known)
        sequence.held = len(known) + n
        self._table[sequence.row, len(known) : sequence.held] = self.pool.allocate(n)
        self._remember(sequence, sequence.held)
        return Work(sequence, len(known), n)

    def _take_row(self, sequence: Sequence, slots: np.ndarray) -> None:
        """Begin running with `slots`, which the caller has retained."""
        sequence.row = self._rows.pop()
        self._table[sequence.row, : len(slots)] = slots
        sequence.computed = sequence.held = len(slots)
        sequence.epoch = self.epoch
        if not sequence.n_retractions:
            sequence.cached_tokens = len(slots)
            self.stats.cached_tokens += len(slots)

    def _free_up(self, n: int, alone: bool = False) -> bool:
        """Make sure that `n` slots are free, evicting prefixes that nobody uses; all of them for a sequence left alone."""
        short = n - self.pool.n_free
        if short > 0:
            self.tree.evict(max(short, self.pool.capacity // EVICT_FRACTION))
            if alone and self.pool.n_free < n:
                self.tree.flush()
        return self.pool.n_free >= n

    def _retract(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.n_retractions += 1
        self.stats.retractions += 1
        self.waiting.appendleft(sequence)

    # ------------------------------------------------------------------------------------------------------ results

    def _commit(self, sequences: list[Sequence], sampled: SampledTokens) -> None:
        version = self.weight_version
        self.stats.new_tokens += len(sequences)
        for i, (sequence, token, logprob) in enumerate(zip(sequences, sampled.tokens, sampled.logprobs, strict=True)):
            sequence.out_ids.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(version)
            if sampled.top is not None:
                sequence.top.append(sampled.top[i])
            finish = self._check(sequence, token)
            if finish is not None:
                self._finish(sequence, finish)
            elif sequence.stream:
                self.events.append(sequence)
        self.running = [s for s in self.running if s.finish is None]

    def _check(self, sequence: Sequence, token: int) -> Finish | None:
        p = sequence.sampling
        if (token in self._eos and not p.ignore_eos) or token in p.stop_token_ids:
            return Finish("stop", matched=token)
        if p.stop:
            longest = max(map(len, p.stop))
            text = self.config.decode(sequence.out_ids[-4 * longest - 8 :])  # a character has at most four tokens
            for stop in p.stop:
                if stop in text:
                    return Finish("stop", matched=stop)
        if len(sequence.out_ids) >= p.max_new_tokens:
            return Finish("length")
        return None

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        if sequence.row >= 0:
            if sequence.epoch == self.epoch and sequence.computed:
                self._remember(sequence, sequence.computed)
            if sequence.want_routes and self.pool.routes is not None and sequence.computed == len(sequence) - 1:
                slots = torch.from_numpy(self._table[sequence.row, : sequence.computed]).to(self.pool.device)
                sequence.routed_experts = self.pool.routes[slots].to(torch.int32).cpu().numpy()
            self._release(sequence)
        sequence.finish = finish
        self.events.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(self._table[sequence.row, : sequence.held])
        self._rows.append(sequence.row)
        sequence.row, sequence.computed, sequence.held = -1, 0, 0

    def _remember(self, sequence: Sequence, n: int) -> None:
        self.tree.insert(self._keys(sequence, n), self._table[sequence.row, :n])

    def _keys(self, sequence: Sequence, n: int) -> np.ndarray:
        """Prefix keys of the first `n` tokens."""
        prompt = sequence.prompt
        if n <= len(prompt):
            return prompt.keys[:n]
        return np.concatenate([prompt.keys, np.asarray(sequence.out_ids[: n - len(prompt)], np.int64)])
