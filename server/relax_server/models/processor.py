"""A model folder without its weights: tokens, chat template, media features and positions.

Token ids come in two forms. In *wire* form each media item is one placeholder, as the SGLang API takes them. *Expanded*
ids hold one placeholder per embedding, as the model sees them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from relax_sdk.errors import ConfigError, TokenError
from relax_sdk.media import Media, MediaKey, MediaRef
from relax_sdk.messages import AssistantMessage, Message, Text
from relax_server.models.answers import AnswerReader
from relax_server.models.chat_template import compiled
from relax_server.models.families import Family, family_of, trained_part
from relax_server.models.layout import hf_config, unreadable
from relax_server.models.media_features import NO_TENSOR, FeatureExtractor, Kind, MediaFeatures
from relax_server.models.media_places import MediaTokens, Placed
from relax_server.models.processor_config import ProcessorConfig
from relax_server.models.shared_features import SharedFeatures
from relax_server.models.text_bounds import TextBounds, context_of

__all__ = ["MediaFeatures", "Processor", "Rendered"]

MARK = "\u2402answer\u2403"
"""A text that stands for a response while the template around it is found out."""

FEATURE_CACHE_BYTES = 256 * 2**20
LONG_TEXT = 4096
"""Characters of a text that other threads do not wait for."""


@dataclass(frozen=True)
class Rendered:
    """Messages as token ids in wire form, and the media their placeholders stand for, in order."""

    ids: list[int]
    media: list[Media] = field(default_factory=list)


class Processor:
    """Tokens, template, features and positions of one model; safe to use from several threads."""

    def __init__(self, path: Path, shared: Path | None = None) -> None:
        from transformers import AutoTokenizer

        self.path = path
        config: Any = hf_config(path)
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise unreadable(path, error) from error
        self.family: Family = family_of(config.model_type, str(path))
        self.hf_config: Any = trained_part(config)
        """Configuration of what is trained, which is the thinker where the folder holds a whole model."""
        text_config = self.family.text(self.hf_config)
        self.vocab_size: int = text_config.vocab_size
        self.bounds = TextBounds(self._backend, context_of(text_config))
        """What texts can have, told without encoding them."""
        self._special_tokens: dict[str, Any] = self.tokenizer.special_tokens_map  # made anew at every look
        self.eos_ids: tuple[int, ...] = self._eos_ids()
        self.answers = AnswerReader(self.tokenizer, self.vocab_size, self.eos_ids)
        self.placeholder_ids: dict[str, int] = {}
        self.banned_ids: tuple[int, ...] = ()
        self._extract: FeatureExtractor | None = None
        self._shared: SharedFeatures | None = None
        self._tokens = MediaTokens({}, (-1, -1), (-1, -1), self._encode)
        rule = self.family.media
        if rule is not None:
            c = self.hf_config
            self.placeholder_ids = {kind: getattr(c, f"{kind}_token_id") for kind in rule.kinds}
            vision, audio = self._brackets("vision"), self._brackets("audio")
            self.banned_ids = tuple(sorted({*self.placeholder_ids.values(), *vision, *audio} - {-1}))
            self._tokens = MediaTokens(self.placeholder_ids, vision, audio, self._encode)
            settings = ProcessorConfig.load(path)
            settings.check_model(path, c.vision_config, getattr(c, "audio_config", None))
            self._extract = FeatureExtractor(settings, rule)
            self._shared = SharedFeatures(shared, settings.digest) if shared is not None else None
        self._kinds = {id: kind for kind, id in self.placeholder_ids.items()}
        self._features: OrderedDict[MediaKey, MediaFeatures] = OrderedDict()
        self._features_bytes = 0
        self._lock = threading.Lock()

    @classmethod
    def load(cls, path: str | Path, shared: Path | None = None) -> Processor:
        """Read a model folder.

        Args:
            path: the folder.
            shared: a folder in shared memory where media features are exchanged with other processes.

        Raises:
            ConfigError: not a model folder.
        """
        return cls(Path(path), shared)

    @property
    def modalities(self) -> frozenset[str]:
        """Media kinds the model takes."""
        return frozenset(self.placeholder_ids)

    def _eos_ids(self) -> tuple[int, ...]:
        from transformers import GenerationConfig

        ids: set[int] = {self.tokenizer.eos_token_id} if self.tokenizer.eos_token_id is not None else set()
        if (self.path / "generation_config.json").exists():
            stated = GenerationConfig.from_pretrained(self.path, local_files_only=True).eos_token_id
            ids |= set(stated if isinstance(stated, list) else [] if stated is None else [stated])
        if not ids:
            raise ConfigError(f"{self.path}: the model names no end-of-turn token")
        return tuple(sorted(ids))

    def _brackets(self, what: str) -> tuple[int, int]:
        """The tokens before and after a medium; -1 where the model has none."""
        found = [getattr(self.hf_config, f"{what}_{end}_token_id", None) for end in ("start", "end")]
        first, last = (-1 if id is None else int(id) for id in found)
        return first, last

    # ---------------------------------------------------------------------------------------------------- messages

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> Rendered:
        """A whole conversation and the prompt for the next answer.

        Raises:
            TokenError: the text itself contains media placeholders, or media the model cannot take.
        """
        text = self._template(messages, tools, generate=True)
        return self._rendered(text, messages)

    def render_append(self, messages: Sequence[Message], closed: bool) -> Rendered:
        """Only the tokens that follow a response: the rest of its turn, `messages`, and the prompt for the next answer.

        Args:
            messages: the new ones, none of them the assistant's.
            closed: whether the response ended with an end-of-turn token of its own.

        Raises:
            TokenError: as `render`, or the template does not let a conversation be continued.
        """
        base = [Message("user", (Text("x"),)), AssistantMessage(content=(Text(MARK),))]
        text = self._template([*base, *messages], (), generate=True)
        if MARK not in text:
            raise TokenError(f"{self.path}: the chat template drops earlier answers, so turns cannot be appended to it")
        rest = text[text.index(MARK) + len(MARK) :]
        if closed:
            for token in map(self.tokenizer.convert_ids_to_tokens, self.eos_ids):
                if rest.startswith(token):
                    rest = rest[len(token) :]
                    break
        return self._rendered(rest, messages)

    def encode_action(self, message: AssistantMessage) -> list[int]:
        """An answer as the model would have to write it, end-of-turn token included; for the format warm-up."""
        base = [Message("user", (Text("x"),))]
        before = self._template(base, (), generate=True)
        text = self._template([*base, message], (), generate=False)
        if not text.startswith(before):
            raise TokenError(f"{self.path}: the chat template writes answers elsewhere than after its generation prompt")
        ids = self._encode(text[len(before) :])
        end = next((i for i, id in enumerate(ids) if id in self.eos_ids), len(ids) - 1)
        return ids[: end + 1]

    def _template(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], generate: bool) -> str:
        rows = [self._template_message(m) for m in messages]
        schemas: Any = list(tools) or None
        program = compiled(self.tokenizer.get_chat_template(tools=schemas))
        return program.render(
            messages=rows, tools=schemas, documents=None, add_generation_prompt=generate, **self._special_tokens
        )

    def _template_message(self, message: Message) -> dict[str, Any]:
        content: Any = message.text
        media = message.media
        if media:
            unknown = {m.kind for m in media} - self.modalities
            if unknown:
                takes = sorted(self.modalities) or "text only"
                raise TokenError(f"the model {self.path.name} takes {takes}, not {sorted(unknown)}")
            content = [{"type": "text", "text": p.text} if isinstance(p, Text) else {"type": p.kind} for p in message.content]
        row: dict[str, Any] = {"role": message.role, "content": content}
        if message.tool_calls:
            row["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
        if message.tool_call_id is not None:
            row["tool_call_id"] = message.tool_call_id
        return row

    @property
    def _backend(self) -> Any:
        """The tokenizer without what transformers adds; None where that changes what comes out."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        return backend if backend is None or (backend.truncation is None and backend.padding is None) else None

    def _encode(self, text: str) -> list[int]:
        backend = self._backend
        if backend is None:
            return self.tokenizer.encode(text, add_special_tokens=False)
        if len(text) > LONG_TEXT:
            return self.bounds.encode(backend, text)
        return backend.encode(text, add_special_tokens=False).ids  # the same, at half the cost for a short text

    def _rendered(self, text: str, messages: Sequence[Message]) -> Rendered:
        ids = self._encode(text)
        media = [item for message in messages for item in message.media]
        found = [] if self._kinds.keys().isdisjoint(ids) else [self._kinds[id] for id in ids if id in self._kinds]
        if found != [m.kind for m in media]:
            raise TokenError(
                f"{len(found)} media placeholders in the text ({', '.join(found) or 'none'}) for {len(media)} media "
                f"({', '.join(m.kind for m in media) or 'none'}); text must not contain placeholder tokens"
            )
        return Rendered(ids, media)

    def decode(self, ids: Sequence[int]) -> str:
        """Token ids as text, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def parse(self, ids: Sequence[int], finish_reason: str, tools: Sequence[Mapping[str, Any]] = ()) -> AssistantMessage:
        """A response as a message: text, tool calls, and the control tokens that are neither.

        Args:
            ids: response tokens.
            finish_reason: `stop`, `length` or `abort`.
            tools: OpenAI schemas of the tools the model was offered.
        """
        return self.answers.message(ids, finish_reason, tools)

    # ------------------------------------------------------------------------------------------------------- media

    def features(self, data: bytes, sha256: str, kind: Kind) -> MediaFeatures:
        """The features of one item, from a cache where it was seen before as the same kind.

        Raises:
            TokenError: the model does not take this kind.
            MediaError: damaged.
        """
        key = kind, sha256
        with self._lock:
            cached = self._features.get(key)
            if cached is not None:
                self._features.move_to_end(key)
                return cached
        if self._extract is None:
            raise TokenError(f"the model {self.path.name} takes text only, not {kind}")
        made = self._shared.get(sha256, kind) if self._shared is not None else None
        if made is None:
            made = self._extract(data, kind)
            if self._shared is not None:
                self._shared.put(sha256, made)
        with self._lock:
            if key not in self._features:
                self._features[key] = made
                self._features_bytes += made.tensor.nbytes
            while self._features_bytes > FEATURE_CACHE_BYTES and len(self._features) > 1:
                _, old = self._features.popitem(last=False)
                self._features_bytes -= old.tensor.nbytes
        return made

    def outline(self, data: bytes, ref: MediaRef) -> MediaFeatures:
        """The features of one item without their tensor, for what only counts; they are the same as those of `features`.

        Where features are shared with other processes they are made whole, as these would have to make them.

        Raises:
            TokenError, MediaError: as `features`.
        """
        if self._extract is None or self._shared is not None or self.has_features(ref.sha256, ref.kind):
            return replace(self.features(data, ref.sha256, ref.kind), tensor=NO_TENSOR)
        return self._extract.outline(data, ref)

    def has_features(self, sha256: str, kind: Kind) -> bool:
        """Whether the features of this item are in the cache, so that its bytes need not be read."""
        with self._lock:
            return (kind, sha256) in self._features

    def expand(self, ids: Sequence[int], features: Sequence[MediaFeatures]) -> list[int]:
        """Wire form to expanded form.

        Raises:
            TokenError: placeholders and features differ in number or kind; both counts are given.
        """
        if not features and not any(id in self._kinds for id in ids):
            return list(ids)
        kinds = [self._kinds[id] for id in ids if id in self._kinds]
        if kinds != [f.kind for f in features]:
            raise TokenError(
                f"{len(kinds)} media placeholders ({', '.join(kinds) or 'none'}) but {len(features)} media "
                f"({', '.join(f.kind for f in features) or 'none'})"
            )
        out: list[int] = []
        item = iter(features)
        for id in ids:
            out += self.place(next(item)).ids.tolist() if id in self._kinds else [id]
        return out

    def shown_fps(self, items: Sequence[MediaFeatures | None]) -> list[float | None]:
        """Frames per second at which the model is shown each item, see `Turn.shown_fps`."""
        pace = [None if item is None else item.second_per_grid for item in items]
        if self._extract is None or not any(pace):
            return []
        frames = self._extract.config.video.temporal
        return [None if seconds is None else frames / seconds for seconds in pace]

    def place(self, item: MediaFeatures) -> Placed:
        """What the placeholder of an item stands for."""
        assert self.family.media is not None
        return self.family.media.place(item, self.hf_config, self._tokens)

    def collapse(self, ids: Sequence[int]) -> list[int]:
        """Expanded form to wire form: each item becomes one placeholder."""
        rule = self.family.media
        if rule is not None and rule.collapse is not None:
            ids = rule.collapse(ids, self._tokens)
        return [id for i, id in enumerate(ids) if id not in self._kinds or i == 0 or ids[i - 1] != id]

    def placeholders(self, ids: Sequence[int]) -> list[tuple[str, int, int]]:
        """Runs of placeholders in expanded ids as (kind, start, length)."""
        runs: list[tuple[str, int, int]] = []
        if not self._kinds:
            return runs
        array = np.asarray(ids)
        where = np.flatnonzero(np.isin(array, list(self._kinds)))
        start = 0
        for i in range(1, len(where) + 1):
            if i == len(where) or where[i] != where[i - 1] + 1 or array[where[i]] != array[where[i - 1]]:
                runs.append((self._kinds[int(array[where[start]])], int(where[start]), i - start))
                start = i
        return runs

    def placed(self, ids: Sequence[int], features: Sequence[MediaFeatures]) -> list[tuple[int, Placed]]:
        """Where each item is in expanded ids: its first token, and what stands there.

        Raises:
            TokenError: the ids are not those that the features expand to.
        """
        array = np.asarray(ids, np.int64)
        where = np.flatnonzero(np.isin(array, list(self._kinds))) if self._kinds else np.zeros(0, np.int64)
        out: list[tuple[int, Placed]] = []
        seen = 0
        for item in features:
            placed = self.place(item)
            start = int(where[seen] - placed.inside[0]) if seen < len(where) else len(array)
            if start < 0 or not np.array_equal(array[start : start + len(placed)], placed.ids):
                runs = self.placeholders(ids)
                if len(runs) != len(features) and len(placed) == len(placed.inside):
                    raise TokenError(f"{len(runs)} runs of media placeholders but {len(features)} media")
                raise TokenError(
                    f"the placeholders from token {start} on are not those of {item.n_tokens} {item.kind} embeddings"
                )
            seen += len(placed.inside)
            out.append((start, placed))
        if seen != len(where):
            raise TokenError(f"{len(where)} media placeholders, but {seen} embeddings of {len(features)} media")
        return out

    def positions(self, ids: Sequence[int], features: Sequence[MediaFeatures]) -> np.ndarray:
        """M-RoPE positions (time, height, width) of expanded ids, as transformers counts them; text has three equal rows.

        Returns:
            float32 [3, len(ids)].

        Raises:
            TokenError: a run of placeholders is not as long as its features.
        """
        return self.count(ids, features)[0]

    def count(self, ids: Sequence[int], features: Sequence[MediaFeatures]) -> tuple[np.ndarray, float]:
        """Positions as `positions` gives them, and that of the token that comes next.

        Raises:
            TokenError: a run of placeholders is not as long as its features.
        """
        n = len(ids)
        placed = self.placed(ids, features)
        if not placed:
            return np.broadcast_to(np.arange(n, dtype=np.float32), (3, n)), float(n)
        out = np.empty((3, n), np.float32)
        at, position = 0, 0.0
        for start, item in placed:
            out[:, at:start] = position + np.arange(start - at)
            position += start - at
            out[:, start : start + len(item)] = item.positions + np.float32(position)
            position += item.after
            at = start + len(item)
        out[:, at:] = position + np.arange(n - at)
        return out, position + n - at
