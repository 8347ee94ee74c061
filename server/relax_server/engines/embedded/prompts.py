"""Wire ids and media to a prompt the model can run: media are read, checked and decoded off the event loop, once each."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from relax_sdk.errors import MediaError, TokenError
from relax_sdk.media import LIMITS, probe
from relax_server.engines.embedded.core import Prompt, PromptMedia, RequestError
from relax_server.models.media_features import Kind, MediaFeatures
from relax_server.models.processor import Processor

V = TypeVar("V")

CACHE_BYTES = 128 * 2**20
"""Size of each of the two caches; both hold the same feature arrays."""


@dataclass(frozen=True)
class LoadedMedia:
    """A media item after decoding."""

    key: int
    """Negative int64, of kind and sha256."""
    features: MediaFeatures


class _Cache(Generic[V]):
    """Least recently used first out, bounded by bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._bytes = 0
        self._items: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()

    def get(self, key: Hashable) -> V | None:
        found = self._items.get(key)
        if found is None:
            return None
        self._items.move_to_end(key)
        return found[0]

    def put(self, key: Hashable, value: V, nbytes: int) -> None:
        if key not in self._items:
            self._items[key] = (value, nbytes)
            self._bytes += nbytes
        while self._bytes > self._max and len(self._items) > 1:
            self._bytes -= self._items.popitem(last=False)[1][1]


class PromptBuilder:
    """Builds prompts; used on one event loop.

    Args:
        processor: of the served model.
        media_root: the only folder paths may point into, or None for data URIs only.
        threads: for reading and decoding media.
    """

    def __init__(self, processor: Processor, media_root: Path | None, threads: int = 2) -> None:
        self.processor = processor
        self._root = media_root.resolve() if media_root else None
        self._pool = ThreadPoolExecutor(threads, "media")
        self._media: _Cache[LoadedMedia] = _Cache(CACHE_BYTES)
        self._prompts: _Cache[Prompt] = _Cache(CACHE_BYTES)
        self._loading: dict[Hashable, asyncio.Future[LoadedMedia]] = {}
        self._kind_of = {id: kind for kind, id in processor.placeholder_ids.items()}

    async def build(self, ids: Sequence[int], media: dict[Kind, list[str]]) -> Prompt:
        """A prompt of wire ids.

        Args:
            ids: one placeholder per media item.
            media: by kind, in the order of that kind's placeholders; paths or data URIs.

        Raises:
            RequestError: empty, ids outside the vocabulary, media that do not fit the placeholders or cannot be decoded.
        """
        if not ids:
            raise RequestError("the prompt is empty")
        if min(ids) < 0 or max(ids) >= self.processor.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.processor.vocab_size)
            raise RequestError(f"token id {wrong} is outside the vocabulary of {self.processor.vocab_size}")
        sources = self._in_order(ids, media)
        names: list[tuple[Kind, Hashable]] = [(kind, self._name(source)) for kind, source in sources]
        key = (np.asarray(ids, np.int64).tobytes(), *names)
        prompt = self._prompts.get(key)
        if prompt is None:
            items = [await self._load(n, source) for n, (_, source) in zip(names, sources, strict=True)]
            prompt = self._make(ids, items)
            self._prompts.put(key, prompt, 64 * len(prompt) + sum(i.features.tensor.nbytes for i in items))
        return prompt

    async def _run(self, work: Callable[[], V]) -> V:
        """Run CPU work in the media threads."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _in_order(self, ids: Sequence[int], media: dict[Kind, list[str]]) -> list[tuple[Kind, str]]:
        """Media in the order of their placeholders."""
        given = {kind: len(sources) for kind, sources in media.items() if sources}
        if not given and not self._kind_of:
            return []
        kinds = [self._kind_of[i] for i in ids if i in self._kind_of]
        wanted = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
        if wanted != given:
            raise RequestError(
                f"the prompt has media placeholders {wanted or 'for nothing'} but the request brings {given or 'no media'}; "
                "input_ids take one placeholder per media item"
            )
        rest = {kind: iter(sources) for kind, sources in media.items()}
        return [(kind, next(rest[kind])) for kind in kinds]  # type: ignore[index]

    def _name(self, source: str) -> Hashable:
        """What a source is cached under: changes when the file does."""
        if source.startswith("data:"):
            return hashlib.blake2b(source.encode(), digest_size=32).digest()
        path = self._resolve(source)
        stat = os.stat(path)
        return (str(path), stat.st_mtime_ns, stat.st_size, stat.st_ino)

    def _resolve(self, source: str) -> Path:
        """A path inside the media folder, symbolic links followed."""
        shown = source if len(source) <= 120 else source[:117] + "..."
        if "://" in source:
            raise RequestError(f"media {shown!r}: URLs are not fetched; send a data URI or a path inside the media folder")
        if self._root is None:
            raise RequestError(f"media {shown!r}: this engine was started without --media-root and takes data URIs only")
        try:
            path = (self._root / source).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            path = None
        if path is None or not path.is_relative_to(self._root) or not path.is_file():
            raise RequestError(f"media {shown!r}: no such file inside the engine's media folder")
        return path

    async def _load(self, name: tuple[Kind, Hashable], source: str) -> LoadedMedia:
        found = self._media.get(name)
        if found is not None:
            return found
        loading = self._loading.get(name)
        if loading is None:
            loading = asyncio.ensure_future(self._run(lambda: self._decode(name[0], source)))
            self._loading[name] = loading
            loading.add_done_callback(lambda done: self._loaded(name, done))
        return await asyncio.shield(loading)

    def _loaded(self, name: Hashable, done: asyncio.Future[LoadedMedia]) -> None:
        del self._loading[name]
        if not done.cancelled() and done.exception() is None:
            self._media.put(name, done.result(), done.result().features.tensor.nbytes)

    def _decode(self, kind: Kind, source: str) -> LoadedMedia:
        try:
            data = _data_uri(source) if source.startswith("data:") else self._read(source)
            ref = probe(data, kind)
            features = self.processor.features(data, ref.sha256, kind)
        except (MediaError, TokenError) as error:
            raise RequestError(f"{kind}: {error}") from error
        digest = hashlib.sha256(f"{kind}:{ref.sha256}".encode()).digest()
        return LoadedMedia(-1 - (int.from_bytes(digest[:8], "big") >> 1), features)

    def _read(self, source: str) -> bytes:
        path = self._resolve(source)
        if path.stat().st_size > LIMITS.max_bytes:
            raise MediaError(f"{path.name}: more than the limit of {LIMITS.max_bytes:,} bytes")
        return path.read_bytes()

    def _make(self, ids: Sequence[int], items: list[LoadedMedia]) -> Prompt:
        features = [item.features for item in items]
        try:
            expanded = self.processor.expand(ids, features)
            placed = self.processor.placed(expanded, features) if items else []
            positions, after = self.processor.count(expanded, features) if items else (None, 0.0)
        except TokenError as error:
            raise RequestError(str(error)) from error
        tokens = np.asarray(expanded, np.int64)
        keys = tokens.copy() if items else tokens
        media = []
        for item, (start, what) in zip(items, placed, strict=True):
            keys[start : start + len(what)] = item.key
            media.append(PromptMedia(item.key, start, what.rows, item.features))
        offset = after - len(expanded) if positions is not None else 0.0
        digest = hashlib.blake2b(keys.tobytes(), digest_size=16).digest()
        return Prompt(list(expanded), tokens, keys, digest, positions, offset, tuple(media))


def _data_uri(source: str) -> bytes:
    head, _, body = source.partition(",")
    if not head.endswith(";base64") or not body:
        raise MediaError("a data URI must have the form data:<type>;base64,<data>")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise MediaError(f"the data URI is not valid base64 ({error})") from error
