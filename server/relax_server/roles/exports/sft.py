"""Rows of the format `sft`: conversations to imitate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from datasets import Value

from relax_server.roles.exports.base import USABLE, Source
from relax_server.roles.exports.columns import media_columns, message_feature, plain_messages


class Conversations:
    """One row an episode that came to its end: `messages`, `tools` as JSON, the media in order, and the reward."""

    single = False

    def __init__(self, source: Source) -> None:
        self.source = source

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """See `parquet.Rows`."""
        for t in self.source.trajectories():
            if t.status not in USABLE:
                self.source.skipped[f"episodes that {t.status}"] += 1
                continue
            row = {"id": t.id, "reward": t.reward, "messages": t.messages}
            yield t.split, row | media_columns(self.source.media(t, t.messages))

    def features(self, typed: bool) -> dict[str, Any]:
        """See `parquet.Rows`."""
        columns = {"messages": message_feature(typed), "id": Value("string"), "reward": Value("float64")}
        return columns | tools_column(self.source)

    def shaped(self, row: dict[str, Any], typed: bool) -> dict[str, Any]:
        """See `parquet.Rows`."""
        return row | {"messages": plain_messages(row["messages"], typed)} | tools_value(self.source)


def tools_column(source: Source) -> dict[str, Any]:
    """The column of the tools' schemas, where the environment has tools."""
    return {"tools": Value("string")} if source.request.tools else {}


def tools_value(source: Source) -> dict[str, str]:
    """The value of that column."""
    return {"tools": json.dumps(source.request.tools)} if source.request.tools else {}
