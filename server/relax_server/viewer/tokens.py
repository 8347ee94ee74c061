"""Each token's own text, from a model folder's tokenizer, without torch or transformers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from relax_sdk.errors import ConfigError
from relax_server.models.layout import model_config

TOKENIZER = "tokenizer.json"
KINDS = ("image", "audio", "video")
MOST = 4
"""Tokenizers that are kept."""


class TokenTexts:
    """Texts of the tokens of one model folder.

    Args:
        folder: of the model.

    Raises:
        ConfigError: it has no tokenizer that can be read.
    """

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer: Any = Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # the library raises Exception itself
            raise ConfigError(f"{folder / TOKENIZER} cannot be read ({error})") from error
        self._added: set[int] = set(self._tokenizer.get_added_tokens_decoder())
        self._bytes = _byte_alphabet() if _is_byte_level(folder) else None
        self._texts: dict[int, str] = {}
        self.placeholders = _placeholders(folder)
        """Kind of media by the id of its placeholder."""

    def texts(self, ids: Iterable[int]) -> list[str]:
        """The text of each token alone; bytes that are only a part of a character as `\\xe2`."""
        known = self._texts
        return [known[id] if id in known else known.setdefault(id, self._text(id)) for id in ids]

    def count_placeholders(self, ids: Sequence[int]) -> dict[str, int]:
        """Placeholder tokens by kind of media; kinds without one are left out."""
        counts = {kind: 0 for kind in self.placeholders.values()}
        if self.placeholders:
            for id in ids:
                if id in self.placeholders:
                    counts[self.placeholders[id]] += 1
        return {kind: n for kind, n in counts.items() if n}

    def _text(self, id: int) -> str:
        token = self._tokenizer.id_to_token(id)
        if token is None:
            return unnamed(id)
        if id in self._added:
            return token
        if self._bytes is None:
            return self._tokenizer.decode([id], skip_special_tokens=False) or token
        data = bytes(self._bytes[character] for character in token if character in self._bytes)
        return data.decode(errors="backslashreplace")


def unnamed(id: int) -> str:
    """What stands for a token whose text is not known."""
    return f"⟨{id}⟩"


class Tokenizers:
    """The tokenizers that are in use, a few of them; safe to use from several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Path, int], TokenTexts] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, folders: Iterable[Path]) -> TokenTexts | None:
        """The tokenizer of the first folder that has one; None: none has one that can be read."""
        for folder in folders:
            try:
                key = folder, (folder / TOKENIZER).stat().st_mtime_ns
            except OSError:
                continue
            with self._lock:
                known = self._known.get(key)
                if known is None:
                    try:
                        known = self._known[key] = TokenTexts(folder)
                    except ConfigError:
                        continue
                self._known.move_to_end(key)
                while len(self._known) > MOST:
                    self._known.popitem(last=False)
            return known
        return None


def _placeholders(folder: Path) -> dict[int, str]:
    try:
        config = model_config(folder)
    except ConfigError:
        return {}
    config = config.get("thinker_config") or config
    names = [(kind, f"{kind}_token_{end}") for kind in KINDS for end in ("id", "index")]
    return {id: kind for kind, name in names if isinstance(id := config.get(name), int)}


def _is_byte_level(folder: Path) -> bool:
    """Whether the tokens are written in the alphabet in which each character stands for a byte."""
    import orjson

    decoder = orjson.loads((folder / TOKENIZER).read_bytes()).get("decoder") or {}
    return any(part.get("type") == "ByteLevel" for part in [decoder, *(decoder.get("decoders") or ())])


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The byte of each character of GPT-2's alphabet: printable ones stand for themselves, the others for those from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
