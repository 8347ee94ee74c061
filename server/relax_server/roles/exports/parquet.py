"""A folder of parquet files for `datasets.load_dataset`: one file a split, media inside, and a card that names the splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from relax_sdk.media import MediaRef
from relax_server.roles.exports.base import Source
from relax_server.roles.exports.columns import media_features, schema_of

ROWS = 32
"""Rows that are written together; viewers load as many to show one."""


class Rows(Protocol):
    """A kind of rows; `rows` is called twice and gives the same both times."""

    source: Source
    single: bool
    """See `media_features`."""

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The split and the values of each row; media columns hold lists of `MediaRef`."""
        ...

    def features(self, typed: bool) -> dict[str, Any]:
        """The features of all columns but those of media.

        Args:
            typed: any row has media.
        """
        ...

    def shaped(self, row: dict[str, Any], typed: bool) -> dict[str, Any]:
        """A row's values, but those of media, in the form of `features`."""
        ...


def write_parquet(table: Rows, folder: Path) -> dict[str, int]:
    """Write rows as files `data/<split>-00000-of-00001.parquet`.

    Returns:
        Rows by split.
    """
    skipped = table.source.skipped
    most: Counter[str] = Counter()
    for _, row in table.rows():
        for name, value in row.items():
            if _is_media(value):
                most[name] = max(most[name], len(value))
    skipped.clear()  # they are counted again
    media, typed = media_features(most, table.single), any(most.values())
    schema = schema_of(table.features(typed) | dict(media.values()))
    (folder / "data").mkdir()
    files: dict[str, _File] = {}
    try:
        for split, row in table.rows():
            values = table.shaped({name: value for name, value in row.items() if name not in most}, typed)
            for name, (final, _) in media.items():
                items = [_item(table.source, ref) for ref in row[name]]
                values[final] = items if final == name else items[0] if items else None
            if split not in files:
                files[split] = _File(folder / "data" / f"{split}-00000-of-00001.parquet", schema)
            files[split].add(values)
    finally:
        for file in files.values():
            file.close()
    (folder / "README.md").write_text(_card(table.source, list(files)))
    return {split: file.n for split, file in files.items()}


def _is_media(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, MediaRef) for item in value)


def _item(source: Source, ref: MediaRef) -> dict[str, Any]:
    return {"bytes": source.read(ref), "path": f"{ref.sha256}{ref.extension}"}


class _File:
    """One parquet file."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._schema, self._waiting, self.n = schema, [], 0
        self._writer = pq.ParquetWriter(path, schema)

    def add(self, row: dict[str, Any]) -> None:
        """Write a row, or keep it until there are enough."""
        self._waiting.append(row)
        self.n += 1
        if len(self._waiting) >= ROWS:
            self._flush()

    def close(self) -> None:
        """Write what waits and close the file."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_pylist(self._waiting, schema=self._schema))
            self._waiting = []


def _card(source: Source, splits: list[str]) -> str:
    files = "".join(f"  - split: {split}\n    path: data/{split}-*.parquet\n" for split in splits)
    run, env = source.layout.folder.name, source.config.env
    return (
        f"---\nconfigs:\n- config_name: default\n  data_files:\n{files}---\n\n"
        f"Episodes of the run `{run}` in the environment `{env}`, exported by Relax Gym as `{source.request.format}`.\n"
    )
