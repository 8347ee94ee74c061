"""Rows of the format `datasets`: whole episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from datasets import Value

from relax_server.roles.exports.base import Source
from relax_server.roles.exports.columns import media_columns, message_feature, plain_messages

_NUMBERS = {
    "task_index": "int64",
    "reward": "float64",
    "step": "int64",
    "advantage": "float64",
    "turns": "int64",
    "tokens": "int64",
}
_TEXTS = ("id", "group_id", "env", "status", "rewards", "error")


class Episodes:
    """One row an episode: what was said and shown, its rewards, and how it ended."""

    single = True

    def __init__(self, source: Source) -> None:
        self.source = source

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """See `parquet.Rows`."""
        for t in self.source.trajectories():
            row = {
                name: getattr(t, name)
                for name in ("id", "group_id", "env", "task_index", "reward", "error", "step", "advantage")
            }
            row |= {
                "status": str(t.status),
                "rewards": json.dumps(t.rewards),
                "turns": len(t.turns),
                "tokens": t.n_response_tokens,
            }
            if t.failure is not None:
                row["reward"] = None  # it was not scored
            yield t.split, row | {"messages": t.messages} | media_columns(self.source.media(t, t.messages))

    def features(self, typed: bool) -> dict[str, Any]:
        """See `parquet.Rows`."""
        texts, numbers = dict.fromkeys(_TEXTS, Value("string")), {name: Value(kind) for name, kind in _NUMBERS.items()}
        return texts | numbers | {"messages": message_feature(typed)}

    def shaped(self, row: dict[str, Any], typed: bool) -> dict[str, Any]:
        """See `parquet.Rows`."""
        return row | {"messages": plain_messages(row["messages"], typed)}
