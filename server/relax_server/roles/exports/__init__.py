"""`relax export`: recorded episodes in the forms that other tools read."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from relax_sdk.config import RunConfig
from relax_sdk.errors import ConfigError
from relax_sdk.exporting import Exported, ExportFormat, ExportRequest
from relax_server.roles.exports.base import Source
from relax_server.roles.exports.episodes import Episodes
from relax_server.roles.exports.inspect_log import write_inspect
from relax_server.roles.exports.parquet import write_parquet
from relax_server.roles.exports.preferences import Preferences
from relax_server.roles.exports.sft import Conversations
from relax_server.roles.exports.token_rows import TokenRows
from relax_server.roles.layout import RunLayout
from relax_server.roles.looking import open_records

Write = Callable[[Source, Path], dict[str, int]]
WRITERS: dict[ExportFormat, Write] = {
    "datasets": lambda source, folder: write_parquet(Episodes(source), folder),
    "sft": lambda source, folder: write_parquet(Conversations(source), folder),
    "preferences": lambda source, folder: write_parquet(Preferences(source), folder),
    "tokens": lambda source, folder: write_parquet(TokenRows(source), folder),
    "inspect": write_inspect,
}


def export(config: RunConfig, layout: RunLayout, request: ExportRequest) -> Exported:
    """Write a run's episodes, see `relax_sdk.exporting`; the folder is there when all is written, or not at all."""
    to = request.to
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} holds something; name a folder that does not exist yet")
    skipped: Counter[str] = Counter()
    part = to.with_name(f".{to.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        with open_records(config, layout) as journal:
            rows = WRITERS[request.format](Source(journal, config, layout, request, skipped), part)
        if not rows:
            left = ", ".join(f"{n} were left out ({why})" for why, n in skipped.items())
            raise ConfigError(f"{layout.folder.name} has no episode to export as {request.format}{f': {left}' if left else ''}")
        if to.exists():
            to.rmdir()
        part.rename(to)
    except OSError as error:
        raise ConfigError(f"{to} cannot be written ({error.strerror or error}); name another folder") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Exported(to, rows, dict(skipped))
