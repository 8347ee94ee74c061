"""`relax view --bundle`: runs as a static site, which any file server can show and which needs no Relax Gym."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from relax_sdk.errors import ConfigError
from relax_sdk.media import MediaRef
from relax_server.journal.finding import TrajectoryQuery, TrajectoryRow
from relax_server.journal.sql import SqlJournal
from relax_server.journal.texts import spoken
from relax_server.json_form import as_json
from relax_server.viewer.base import ViewedRun
from relax_server.viewer.built import STATIC
from relax_server.viewer.folders import FolderSource, read_json
from relax_server.viewer.journals import Journals
from relax_server.viewer.media import media_file, media_page
from relax_server.viewer.pages import Pages
from relax_server.viewer.seen import make, model_of, with_urls
from relax_server.viewer.table import MOST, columns_of

SITE = "data/site.json"
FILES = ("metrics.json", "events.json", "timeline.json", "logs.json")
"""Answers about a run that have nothing to do with its journal."""
TOGETHER = 64
"""Media that one process prepares as the model saw them."""
Tell = Callable[[str, int, int], None]
"""Told the run, and how many of how many trajectories are written."""


def write_bundle(paths: Sequence[Path], out: Path, limit: int | None, static: Path = STATIC) -> None:
    """Write a site with a progress line.

    Args:
        paths: as in `FolderSource`.
        out: folder of the site; an earlier site there is replaced.
        limit: trajectories of each run: so many of the newest, the worst and the best; None: all.
        static: folder of the built page.

    Raises:
        ConfigError: there is no run, `out` holds something else, or the page was not built.
        JournalError: a journal cannot be read.
    """
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TextColumn("trajectories"), TimeRemainingColumn()
    with contextlib.closing(Journals()) as journals, Progress(*columns) as progress:
        tasks: dict[str, Any] = {}

        def tell(run: str, done: int, total: int) -> None:
            if run not in tasks:
                tasks[run] = progress.add_task(run, total=total)
            progress.update(tasks[run], completed=done)

        Bundle(FolderSource(paths, journals), out, static).write(limit, tell)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    print(f"{out} holds {len(tasks)} {'run' if len(tasks) == 1 else 'runs'}, {size / 1e6:.1f} MB; look at it with")
    print(f"  python -m http.server --directory {out}")


class Bundle:
    """A static site of runs. Logs, and where things lie on this machine, are left out: a site is for others.

    Args:
        source: the runs.
        out: folder of the site.
        static: folder of the built page.
    """

    def __init__(self, source: FolderSource, out: Path, static: Path) -> None:
        self._runs = [dataclasses.replace(run, shows_paths=False, replay=None) for run in source.runs()]
        self._out, self._static = out, static
        self._pages = Pages("bundle")

    def write(self, limit: int | None, tell: Tell) -> None:
        """Write it; see `write_bundle`."""
        if not self._runs:
            raise ConfigError("there is no run to write; name run folders, or a folder with runs in it")
        if not (self._static / "index.html").is_file():
            raise ConfigError("the page of the viewer was not built: run `make view`")
        self._clear()
        shutil.copytree(self._static, self._out, dirs_exist_ok=True)
        self._put(SITE, self._pages.site())
        for run in self._runs:
            self._write_run(run, limit, tell)
        self._put("data/runs.json", self._pages.answer(self, ["runs.json"], {}))

    def runs(self) -> Sequence[ViewedRun]:
        """See `Source.runs`."""
        return self._runs

    def run(self, name: str) -> ViewedRun | None:
        """See `Source.run`."""
        return next((run for run in self._runs if run.name == name), None)

    def _clear(self) -> None:
        if self._out.exists() and any(self._out.iterdir()):
            if not (self._out / SITE).is_file():
                raise ConfigError(f"{self._out} holds something else than a site of runs; name a new folder")
            shutil.rmtree(self._out / "data")

    def _put(self, path: str, answer: Any) -> Path:
        file = self._out / path
        if not file.resolve().is_relative_to(self._out.resolve()):
            raise ConfigError(f"{path}: a run of this name cannot be written as files")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(as_json(answer))
        return file

    def _write_run(self, run: ViewedRun, limit: int | None, tell: Tell) -> None:
        place = f"data/runs/{run.name}"
        for name in ("run.json", *FILES):
            self._put(f"{place}/{name}", self._pages.answer(self, ["runs", run.name, name], {}))
        journal = run.open_journal()
        rows = chosen(journal, run.run, limit) if journal is not None else []
        tell(run.name, 0, len(rows))
        self._put(f"{place}/trajectories.json", columns_of(rows) | {"next": rows[-1].seq if rows else 0, "total": len(rows)})
        texts: dict[str, list[Any]] = {"seq": [], "text": []}
        shown = self._write_episodes(run, journal, rows, texts, tell) if journal is not None else {}
        self._put(f"{place}/texts.json", texts)
        listed = [item for item in _all_media(run, journal) if item["sha256"] in shown] if journal is not None else []
        linked = {row.seq for row in rows}
        for item in listed:
            item["trajectory_seq"] = item["trajectory_seq"] if item["trajectory_seq"] in linked else None
        self._put(f"{place}/media.json", {"media": listed, "next": 0})
        self._write_media(run, shown)

    def _write_episodes(
        self, run: ViewedRun, journal: SqlJournal, rows: list[TrajectoryRow], texts: dict[str, list[Any]], tell: Tell
    ) -> dict[str, dict[str, Any]]:
        """Write trajectories, and groups with all of their members; returns what is told of their media by sha256."""
        episodes, place, shown = self._pages.episodes(run, journal), f"data/runs/{run.name}", dict[str, dict[str, Any]]()
        written: tuple[str, Path] | None = None
        linked = {row.seq for row in rows}
        for number, row in enumerate(rows, start=1):
            page = episodes.trajectory(row.seq)
            shown |= page["media"]
            self._put(f"{place}/trajectories/{row.seq}.json", _marked(page, linked))
            group = f"{place}/groups/{row.seq}.json"
            if written is None or written[0] != row.group_id:
                whole = episodes.group(row.seq)
                for member in whole["trajectories"]:
                    shown |= _marked(member, linked)["media"]
                written = row.group_id, self._put(group, whole)
            else:
                _same(written[1], self._out / group)
            texts["seq"].append(row.seq)
            texts["text"].append(spoken(episodes.recorded(row.seq)))
            if number % 16 == 0 or number == len(rows):
                tell(run.name, number, len(rows))
        return shown

    def _write_media(self, run: ViewedRun, shown: dict[str, dict[str, Any]]) -> None:
        """Copy the very bytes of media, and write what the model saw of them."""
        place, copied = self._out / f"data/runs/{run.name}", list[tuple[MediaRef, Path]]()
        for sha256, item in shown.items():
            found = None if item["missing"] else media_file(run, item["url"].rpartition("/")[2])
            if found is not None:
                (place / "media").mkdir(exist_ok=True)
                copied.append((MediaRef(sha256, item["mime"], item["size"]), Path(shutil.copy(found[0], place / "media"))))
        model = model_of(run)
        if model is None or not copied:
            return
        (place / "seen").mkdir()
        for part in range(0, len(copied), TOGETHER):
            make(copied[part : part + TOGETHER], model, place / "seen")
        for ref, _ in copied:
            file = place / "seen" / f"{ref.sha256}.json"
            told = read_json(file)
            if "error" in told:
                file.unlink()  # the page says that it is not known
            else:
                file.write_bytes(as_json(with_urls(told, run)))


def chosen(journal: SqlJournal, run: str, limit: int | None) -> list[TrajectoryRow]:
    """The trajectories that are written, oldest first: all, or `limit` of the newest, of the worst and of the best."""
    if limit is not None:
        queries = [TrajectoryQuery(sort=sort, limit=limit) for sort in ("newest", "worst", "best")]
        found = {row.seq: row for query in queries for row in journal.find(run, query)}
        return [found[seq] for seq in sorted(found)]
    rows: list[TrajectoryRow] = []
    while part := journal.find(run, TrajectoryQuery(after=rows[-1].seq if rows else 0, sort="oldest", limit=MOST)):
        rows += part
    return rows


def _marked(page: dict[str, Any], linked: set[int]) -> dict[str, Any]:
    """A trajectory in which it and the members of its group are marked that the site has no page of."""
    for member in (page, *page["group"]):
        if member["seq"] not in linked:
            member["left_out"] = True
    return page


def _all_media(run: ViewedRun, journal: SqlJournal) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    while part := media_page(run, journal, items[-1]["seq"] if items else 0, MOST)["media"]:
        items += part
    return items


def _same(file: Path, other: Path) -> None:
    """Give a file a second name; where the file system has no links, copy it."""
    other.unlink(missing_ok=True)
    try:
        os.link(file, other)
    except OSError:
        shutil.copyfile(file, other)
