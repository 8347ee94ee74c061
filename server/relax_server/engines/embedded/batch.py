"""The work of one step as flat arrays: token ids, positions, media rows and the rows to sample from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from relax_server.engines.embedded.attention import Span, order_spans
from relax_server.engines.embedded.core import PromptMedia, Sequence, Stats
from relax_server.engines.embedded.model import Embedding, EmbeddingCache, MediaRows, ModelRunner


@dataclass(eq=False)
class Work:
    """Tokens `start` to `start + n` of a sequence in this step."""

    sequence: Sequence
    start: int
    n: int
    twin: Work | None = None
    """Has the same prompt and is completed in this step: this sequence (n = 0) samples from its logits."""

    @property
    def is_complete(self) -> bool:
        """Whether a new token is sampled after it."""
        return self.start + self.n == len(self.sequence)


@dataclass
class ForwardBatch:
    """What one forward takes."""

    spans: list[Span]
    ids: np.ndarray
    """int64 [tokens]."""
    positions: np.ndarray
    """int64 [tokens], or float32 [3, tokens] for models with three coordinates."""
    media: list[MediaRows]
    sampled: list[Sequence]
    """Sequences that get a token."""
    sample_rows: np.ndarray
    """int64 [m], flat indices whose logits are computed."""
    logit_rows: np.ndarray
    """int64 [len(sampled)], which of those m each sequence samples from."""


def build(work: list[Work], table: np.ndarray, runner: ModelRunner, embeddings: EmbeddingCache, stats: Stats) -> ForwardBatch:
    """Flatten the work of a step; runs the towers for media that it needs and that are not cached."""
    computing = [w for w in work if w.n]
    spans = [Span(w.sequence.row, w.start, w.n) for w in computing]
    order = order_spans(spans)
    computing, spans = [computing[i] for i in order], [spans[i] for i in order]
    known = _embed(computing, runner, embeddings, stats)
    ids, positions = _tokens(computing, runner.mrope)
    media: list[MediaRows] = []
    last: dict[Work, int] = {}
    at = 0
    for item in computing:
        start, stop = item.start, item.start + item.n
        prompt = item.sequence.prompt
        if start < len(prompt):
            stats.prompt_tokens += min(stop, len(prompt)) - start
            for m in _media_in(item):
                a, b = max(m.start, start), min(m.stop, stop)
                rows = m.rows[a - m.start : b - m.start]
                inside = np.flatnonzero(rows >= 0)
                media.append(MediaRows(inside + (at + a - start), known[m.key], rows[inside]))
        at += item.n
        if item.is_complete:
            last[item] = at - 1
    row_of = {item: i for i, item in enumerate(last)}
    sampled = [w for w in work if (w.twin or w) in row_of]
    return ForwardBatch(
        spans=spans,
        ids=ids,
        positions=positions,
        media=media,
        sampled=[w.sequence for w in sampled],
        sample_rows=np.fromiter(last.values(), np.int64, len(last)),
        logit_rows=np.fromiter((row_of[w.twin or w] for w in sampled), np.int64, len(sampled)),
    )


def _tokens(work: list[Work], mrope: bool) -> tuple[np.ndarray, np.ndarray]:
    """Ids int64 [tokens], and positions int64 [tokens] or float32 [3, tokens], of spans that are in layout order."""
    singles = next((i for i, w in enumerate(work) if w.n > 1), len(work))  # mostly decoding sequences: no array each
    ids = [np.fromiter((_token(w.sequence, w.start) for w in work[:singles]), np.int64, singles)]
    ids += [_ids(w.sequence, w.start, w.start + w.n) for w in work[singles:]]
    places = [np.fromiter((w.start for w in work[:singles]), np.int64, singles)]
    places += [np.arange(w.start, w.start + w.n) for w in work[singles:]]
    flat = np.concatenate(places)
    if not mrope:
        return np.concatenate(ids), flat
    positions = np.empty((3, len(flat)), np.float32)
    positions[:] = flat
    at = 0
    for item in work:
        prompt, start, stop = item.sequence.prompt, item.start, item.start + item.n
        if prompt.positions is not None:
            inside = min(stop, len(prompt)) - start
            if inside > 0:
                positions[:, at : at + inside] = prompt.positions[:, start : start + inside]
            positions[:, at + max(inside, 0) : at + item.n] += np.float32(prompt.offset)
        at += item.n
    return np.concatenate(ids), positions


def _token(sequence: Sequence, index: int) -> int:
    n = len(sequence.prompt)
    return sequence.out_ids[index - n] if index >= n else sequence.prompt.ids[index]


def _ids(sequence: Sequence, start: int, stop: int) -> np.ndarray:
    prompt = sequence.prompt
    n = len(prompt)
    if stop <= n:
        return prompt.tokens[start:stop]
    out = np.asarray(sequence.out_ids[max(0, start - n) : stop - n], np.int64)
    return out if start >= n else np.concatenate([prompt.tokens[start:], out])


def _media_in(item: Work) -> Iterator[PromptMedia]:
    stop = item.start + item.n
    return (m for m in item.sequence.prompt.media if m.start < stop and m.stop > item.start)


def _embed(work: list[Work], runner: ModelRunner, embeddings: EmbeddingCache, stats: Stats) -> dict[int, Embedding]:
    """Tower outputs of all media in this step, by key."""
    known: dict[int, Embedding] = {}
    missing: dict[int, PromptMedia] = {}
    for item in work:
        for m in _media_in(item) if item.start < len(item.sequence.prompt) else ():
            found = embeddings.get(m.key)
            if found is None:
                missing[m.key] = m
            else:
                known[m.key] = found
    if missing:
        made = runner.embed_media([m.features for m in missing.values()])
        stats.media_embedded += len(made)
        for key, embedding in zip(missing, made, strict=True):
            known[key] = embedding
            embeddings.put(key, embedding)
    return known
