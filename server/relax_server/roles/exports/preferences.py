"""Rows of the format `preferences`: two episodes of one group, the one with the larger reward chosen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from datasets import Value

from relax_sdk.recorded import RecordedTrajectory
from relax_server.roles.exports.base import USABLE, Source
from relax_server.roles.exports.columns import media_columns, message_feature, plain_messages
from relax_server.roles.exports.sft import tools_column, tools_value

PARTS = ("prompt", "chosen", "rejected")


class Preferences:
    """One row a pair: the common `prompt`, what followed in the `chosen` and in the `rejected` episode, and their rewards.

    Media of the prompt stand in `images`, `audios` and `videos`, those of later observations in `chosen_images` and so on.
    """

    single = False

    def __init__(self, source: Source) -> None:
        self.source = source

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """See `parquet.Rows`."""
        for group in self.source.groups():
            for better, worse in self._pairs(group):
                prompt, chosen = _cut(better.messages)
                row = {"prompt": prompt, "chosen": chosen, "rejected": _cut(worse.messages)[1], "group_id": better.group_id}
                row |= {"chosen_id": better.id, "rejected_id": worse.id}
                row |= {"chosen_reward": better.reward, "rejected_reward": worse.reward}
                media = media_columns(self.source.media(better, prompt))
                media |= media_columns(self.source.media(better, chosen), "chosen_")
                yield better.split, row | media | media_columns(self.source.media(worse, row["rejected"]), "rejected_")

    def _pairs(self, group: list[RecordedTrajectory]) -> list[tuple[RecordedTrajectory, RecordedTrajectory]]:
        """The pairs of a group that are furthest apart."""
        request, usable = self.source.request, [t for t in group if t.status in USABLE]
        apart = []
        for one, other in itertools.combinations(usable, 2):
            better, worse = (one, other) if one.reward >= other.reward else (other, one)
            if better.reward - worse.reward <= request.margin:
                continue
            if _cut(better.messages)[0] != _cut(worse.messages)[0]:
                self.source.skipped["pairs whose prompts are not the same"] += 1
                continue
            apart.append((better, worse))
        if not apart:
            self.source.skipped["groups without two episodes whose rewards are far enough apart"] += 1
        apart.sort(key=lambda pair: (pair[1].reward - pair[0].reward, pair[0].id, pair[1].id))
        return apart[: request.pairs]

    def features(self, typed: bool) -> dict[str, Any]:
        """See `parquet.Rows`."""
        columns = dict.fromkeys(PARTS, message_feature(typed)) | dict.fromkeys(
            ("group_id", "chosen_id", "rejected_id"), Value("string")
        )
        return columns | dict.fromkeys(("chosen_reward", "rejected_reward"), Value("float64")) | tools_column(self.source)

    def shaped(self, row: dict[str, Any], typed: bool) -> dict[str, Any]:
        """See `parquet.Rows`."""
        return row | {name: plain_messages(row[name], typed) for name in PARTS} | tools_value(self.source)


def _cut(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What stood before the first answer, and the rest."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]
