"""Rows of the format `tokens`: training sequences as they were sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from datasets import List, Value

from relax_server.roles.exports.base import Source
from relax_server.roles.exports.columns import media_columns

_PER_TOKEN = {"ids": "int32", "loss_mask": "int8", "logprobs": "float32", "versions": "int32", "turn": "int32"}
_VALUES = {
    "id": "string",
    "group_id": "string",
    "task_index": "int64",
    "group_index": "int64",
    "sample_index": "int64",
    "status": "string",
    "reward": "float64",
    "step": "int64",
    "advantage": "float64",
}


class TokenRows:
    """One row for each of an episode's `samples()`, with the media of its placeholders in order.

    `logprobs` are the engine's (natural log); where `loss_mask` is 0 they are 0, and `versions` and `turn` are -1.
    `shown_fps` are the frames per second at which the model was shown each of `videos`; empty in records of older versions.
    """

    single = False

    def __init__(self, source: Source) -> None:
        self.source = source

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """See `parquet.Rows`."""
        for t in self.source.trajectories():
            samples = t.samples()
            if not samples:
                self.source.skipped["episodes without answers"] += 1
            for index, sample in enumerate(samples):
                row = {name: getattr(t, name, None) for name in _VALUES}
                row |= {"sample_index": index, "status": str(t.status)} | {name: getattr(sample, name) for name in _PER_TOKEN}
                row["shown_fps"] = [fps for fps in sample.shown_fps if fps is not None]
                yield t.split, row | media_columns(sample.media)

    def features(self, typed: bool) -> dict[str, Any]:
        """See `parquet.Rows`."""
        columns: dict[str, Any] = {name: Value(kind) for name, kind in _VALUES.items()}
        return columns | {name: List(Value(kind)) for name, kind in _PER_TOKEN.items()} | {"shown_fps": List(Value("float64"))}

    def shaped(self, row: dict[str, Any], typed: bool) -> dict[str, Any]:
        """See `parquet.Rows`."""
        return row
