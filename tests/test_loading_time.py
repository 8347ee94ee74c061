"""Limits for reading models."""

from __future__ import annotations

from pathlib import Path

from relax_server.loading_time import BYTES_PER_SECOND, seconds_to_load


def test_a_limit_grows_with_the_bytes_that_are_read(tmp_path: Path) -> None:
    model, checkpoint = tmp_path / "model", tmp_path / "checkpoint"
    for folder, sizes in ((model, (40 * 10**9, 10**9)), (checkpoint, (100 * 10**6,))):
        folder.mkdir()
        for number, size in enumerate(sizes):
            with (folder / f"{number}.bin").open("wb") as file:
                file.truncate(size)  # no byte of it is on the disk
    assert seconds_to_load(60.0, model) == 60 + 41e9 / BYTES_PER_SECOND
    assert seconds_to_load(60.0, model, checkpoint) == 60 + 41.1e9 / BYTES_PER_SECOND
    assert seconds_to_load(60.0, None, tmp_path / "none") == 60.0
