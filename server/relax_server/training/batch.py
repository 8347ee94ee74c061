"""Training samples as flat arrays: ids, positions and media of every token, and what was recorded of each trained one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from relax_sdk.errors import TokenError
from relax_sdk.media import MediaKey, MediaRef
from relax_sdk.trajectory import Sample
from relax_server.models.processor import MediaFeatures, Processor

ReadMedia = Callable[[MediaRef], bytes]
"""The bytes of a media item."""

MEDIA_SPAN = 1 << 20
"""Keys that one media item may take; more placeholders than any item has."""


@dataclass(frozen=True)
class Trained:
    """One entry for every token with loss mask 1, ordered by sample and by place; all arrays have the same length n."""

    sample: np.ndarray
    """int64, index of the sample."""
    at: np.ndarray
    """int64, index in the sample's ids; at least 1."""
    target: np.ndarray
    """int64, the token."""
    logprob: np.ndarray
    """float64, as the engine reported it."""
    version: np.ndarray
    """int64, the version of the weights that produced it."""
    turn: np.ndarray
    """int64, index of the turn in its trajectory."""

    def __len__(self) -> int:
        return len(self.sample)


@dataclass(frozen=True)
class TokenBatch:
    """Samples of one step. Per-token arrays are flat: sample i has tokens `start[i]` to `start[i + 1]`."""

    ids: np.ndarray
    """int64 [n_tokens]."""
    keys: np.ndarray
    """int64 [n_tokens]; equal keys after equal keys mean equal inputs: token ids, and for a placeholder its media item
    (by content) and place in it."""
    positions: np.ndarray
    """float32 [3, n_tokens]."""
    start: np.ndarray
    """int64 [n_samples + 1]."""
    n_inputs: np.ndarray
    """int64 [n_samples], leading tokens that are inputs: what comes before the last trained token."""
    trained: Trained
    media: tuple[MediaFeatures, ...]
    """Each distinct item once, in the order of `distinct_media`; with several ranks, outlines."""
    vocab_size: int
    """Keys from here on are placeholders: `vocab_size + item * MEDIA_SPAN + place`."""
    routes: tuple[np.ndarray | None, ...] = ()
    """One int32 array [n, decoder layers, top_k] per sample, -1 where the trainer chooses; empty without route replay."""

    def __len__(self) -> int:
        return len(self.n_inputs)

    @property
    def padded_tokens(self) -> int:
        """Tokens of the rectangle that right padding would have made."""
        return len(self) * int(self.n_inputs.max(initial=0))


def distinct_media(samples: Sequence[Sample]) -> list[MediaRef]:
    """The media items of samples, each once, in the order of `TokenBatch.media`."""
    return list({ref.key: ref for ref in chain.from_iterable(sample.media for sample in samples)}.values())


def read_features(samples: Sequence[Sample], processor: Processor, read: ReadMedia) -> dict[MediaKey, MediaFeatures]:
    """Prepare the features of each distinct media item, by its key.

    Raises:
        MediaError: an item is damaged.
        TokenError: the model does not take its kind.
    """
    return prepared(distinct_media(samples), processor, read)


def prepared(refs: Sequence[MediaRef], processor: Processor, read: ReadMedia) -> dict[MediaKey, MediaFeatures]:
    """Prepare the features of media items, by their keys.

    Raises:
        MediaError, TokenError: as `read_features`.
    """
    return {ref.key: processor.features(_bytes(ref, processor, read), ref.sha256, ref.kind) for ref in refs}


def outlined(refs: Sequence[MediaRef], processor: Processor, read: ReadMedia) -> dict[MediaKey, MediaFeatures]:
    """Outline the features of media items, by their keys: all of them but their tensors, which is enough to lay out a batch.

    Raises:
        MediaError, TokenError: as `read_features`.
    """
    return {ref.key: processor.outline(_bytes(ref, processor, read), ref) for ref in refs}


def _bytes(ref: MediaRef, processor: Processor, read: ReadMedia) -> bytes:
    return b"" if processor.has_features(ref.sha256, ref.kind) else read(ref)


def make_batch(
    samples: Sequence[Sample],
    processor: Processor,
    features: dict[MediaKey, MediaFeatures],
    routes: Sequence[np.ndarray | None] = (),
) -> TokenBatch:
    """Lay out samples as flat arrays and check that tokens and media fit together.

    Args:
        samples: each with at least one token of loss mask 1, none of them the first token.
        processor: the model's processor.
        features: the features of all media of the samples, by their keys.
        routes: the routes of each sample, for route replay.

    Raises:
        TokenError: there are no samples, placeholders and media differ, or a trained token has nothing before it or is one
            that cannot be sampled.
    """
    if not samples:
        raise TokenError("no samples")
    lengths = np.fromiter((len(s.ids) for s in samples), np.int64, len(samples))
    start = np.concatenate([[0], np.cumsum(lengths)])
    total = int(start[-1])

    def flat(name: str, dtype: Any) -> np.ndarray:
        return np.fromiter(chain.from_iterable(getattr(s, name) for s in samples), dtype, total)

    ids = flat("ids", np.int64)
    where = np.flatnonzero(flat("loss_mask", np.int64))
    owner = np.repeat(np.arange(len(samples)), lengths)[where]
    trained = Trained(
        sample=owner,
        at=where - start[owner],
        target=ids[where],
        logprob=flat("logprobs", np.float64)[where],
        version=flat("versions", np.int64)[where],
        turn=flat("turn", np.int64)[where],
    )
    n_inputs = np.zeros(len(samples), np.int64)
    n_inputs[trained.sample] = trained.at  # ascending within a sample, so the last one stays
    _check_trained(trained, n_inputs, processor)
    _check_shown(samples, processor, features)
    keys, media = _keys(samples, ids, start, processor, features)
    positions = _positions(samples, keys, ids, start, processor, features)
    return TokenBatch(ids, keys, positions, start, n_inputs, trained, media, processor.vocab_size, tuple(routes))


def _check_trained(trained: Trained, n_inputs: np.ndarray, processor: Processor) -> None:
    if not n_inputs.all():
        raise TokenError(f"sample {int(np.argmin(n_inputs))} has no trained token with another token before it")
    if (trained.at == 0).any():
        sample = int(trained.sample[trained.at == 0][0])
        raise TokenError(f"sample {sample}: its first token has loss mask 1, so nothing predicts it")
    banned = np.isin(trained.target, processor.banned_ids)
    if banned.any():
        tokens = np.unique(trained.target[banned]).tolist()
        raise TokenError(f"{int(banned.sum())} trained tokens are ones that must never be sampled: {tokens}")
    if not np.isfinite(trained.logprob).all():
        raise TokenError(f"{int((~np.isfinite(trained.logprob)).sum())} trained tokens have a logprob that is not finite")


def _check_shown(samples: Sequence[Sample], processor: Processor, features: dict[MediaKey, MediaFeatures]) -> None:
    """See that films are shown here at the pace that the engine was shown them at: positions follow from it, and ids may not.

    Raises:
        TokenError: one is not.
    """
    for i, sample in enumerate(samples):
        if not any(sample.shown_fps):
            continue
        here = processor.shown_fps([features[ref.key] for ref in sample.media])
        if len(here) != len(sample.shown_fps):
            raise TokenError(f"sample {i}: frames per second of {len(sample.shown_fps)} media items, and it has {len(here)}")
        for then, now in zip(sample.shown_fps, here, strict=True):
            if not math.isclose(then or 0.0, now or 0.0, rel_tol=1e-6):
                raise TokenError(
                    f"sample {i}: a film was shown to the engine at {then} frames per second and is shown here at {now}; "
                    "engine and trainer must use the same preprocessor and `media` settings"
                )


def _keys(
    samples: Sequence[Sample], ids: np.ndarray, start: np.ndarray, processor: Processor, features: dict[MediaKey, MediaFeatures]
) -> tuple[np.ndarray, tuple[MediaFeatures, ...]]:
    """Keys of all tokens, and the distinct media items in the order of their numbers."""
    number = {ref.key: i for i, ref in enumerate(distinct_media(samples))}
    placeholders = np.flatnonzero(np.isin(ids, list(processor.placeholder_ids.values())))
    counts = np.diff(np.searchsorted(placeholders, start))
    known: dict[tuple[MediaKey, ...], tuple[np.ndarray, np.ndarray]] = {}
    wanted: list[tuple[np.ndarray, np.ndarray]] = []
    nothing = np.zeros(0, np.int64)
    for i, sample in enumerate(samples):
        names = tuple(ref.key for ref in sample.media)
        if names not in known:
            placed = [(number[n] * MEDIA_SPAN, processor.place(features[n])) for n in names]
            rows = [nothing, *(first + item.order for first, item in placed)]
            known[names] = np.concatenate(rows), np.concatenate([nothing, *(item.ids[item.inside] for _, item in placed)])
        if len(known[names][0]) != counts[i]:
            raise TokenError(
                f"sample {i}: {counts[i]} media placeholders, but {len(known[names][0])} embeddings of {len(names)} media items"
            )
        wanted.append(known[names])
    keys = ids.copy()
    if len(placeholders):
        wrong = np.concatenate([own for _, own in wanted]) != ids[placeholders]
        if wrong.any():
            sample = int(np.searchsorted(start, placeholders[wrong][0], "right") - 1)
            raise TokenError(f"sample {sample}: {int(wrong.sum())} placeholders are of another kind than their media")
        keys[placeholders] = processor.vocab_size + np.concatenate([rows for rows, _ in wanted])
    return keys, tuple(features[key] for key in number)


def _positions(
    samples: Sequence[Sample],
    keys: np.ndarray,
    ids: np.ndarray,
    start: np.ndarray,
    processor: Processor,
    features: dict[MediaKey, MediaFeatures],
) -> np.ndarray:
    """Positions of all tokens. Up to the last item they come from the processor, once per distinct beginning; text
    after it counts on from there."""
    out = np.empty((3, len(ids)), np.float32)
    known: dict[bytes, tuple[np.ndarray, float]] = {}
    media_at = np.flatnonzero(keys >= processor.vocab_size)
    last = np.searchsorted(media_at, start[1:]) - 1  # of media_at, at or before each sample's end
    count = np.arange(int(np.diff(start).max(initial=0)), dtype=np.float64)
    bounds = start.tolist()
    for i, sample in enumerate(samples):
        a, b = bounds[i], bounds[i + 1]
        if not sample.media:
            out[:, a:b] = count[: b - a]
            continue
        ending = processor.place(features[sample.media[-1].key])
        cut = int(media_at[last[i]]) + len(ending) - int(ending.inside[-1])  # with the text that ends an item
        name = keys[a:cut].tobytes()
        if name not in known:
            known[name] = processor.count(ids[a:cut].tolist(), [features[ref.key] for ref in sample.media])
        begin, after = known[name]
        out[:, a:cut] = begin
        out[:, cut:b] = after + count[: b - cut]
    return out
