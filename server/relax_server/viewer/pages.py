"""Every address under `data/` and what it answers; the server and the bundle ask here alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from relax_server.gateway.errors import bad, unknown
from relax_server.journal.finding import TrajectoryQuery
from relax_server.journal.sql import SqlJournal
from relax_server.journal.texts import MOST_CHARACTERS
from relax_server.viewer.base import Source, ViewedRun
from relax_server.viewer.episode import Episodes
from relax_server.viewer.live import Changes
from relax_server.viewer.logs import BYTES, log_page, logs_page
from relax_server.viewer.media import media_file, media_page
from relax_server.viewer.metrics import events_page, metrics_page
from relax_server.viewer.overview import Overviews
from relax_server.viewer.seen import Seen
from relax_server.viewer.summary import Summaries
from relax_server.viewer.table import MOST, search_page, trajectories_page
from relax_server.viewer.timeline import Window, timeline_page
from relax_server.viewer.tokens import Tokenizers

MEDIA = 1000
"""Media of one answer, if nothing else is said."""
Params = Mapping[str, str]


@dataclass(frozen=True)
class File:
    """An answer that is a file's very bytes, which never change under their name."""

    path: Path
    mime: str


class Pages:
    """Answers of the read-only API. What is kept between them is bounded; safe to use from several threads.

    Args:
        mode: `live`: a server answers; `bundle`: the answers are written as files.
    """

    def __init__(self, mode: Literal["live", "bundle"] = "live") -> None:
        self._site = {"mode": mode, "version": version("relax-gym"), "searched": MOST_CHARACTERS}
        self.summaries, self._overviews, self._tokenizers = Summaries(), Overviews(), Tokenizers()
        self.changes = Changes(self.summaries)
        self._seen = Seen()

    def site(self, keys: bool = False) -> dict[str, Any]:
        """What the page asks first, for which no key is wanted; `keys` says whether one is for all else."""
        return self._site | {"keys": keys}

    def close(self) -> None:
        """Remove what was made on request."""
        self._seen.close()

    def answer(self, source: Source, path: Sequence[str], params: Params) -> dict[str, Any] | File:
        """The answer at an address.

        Args:
            source: the runs that the caller may see.
            path: segments behind `data/`, decoded.
            params: of the query.

        Raises:
            RelaxError: there is nothing at the address, or it cannot be read.
        """
        match path:
            case ["site.json"]:
                return self.site()
            case ["runs.json"]:
                return {"runs": [self.summaries.of(run) for run in source.runs()]}
            case ["runs", name, *rest] if rest:
                return self._of_run(known_run(source, name), rest, params)
        raise unknown("page", "/".join(path)[:200])

    def episodes(self, run: ViewedRun, journal: SqlJournal) -> Episodes:
        """What reads the trajectories of a run."""
        return Episodes(run, journal, self._tokenizers.find(run.model_folders()))

    def _of_run(self, run: ViewedRun, path: Sequence[str], params: Params) -> dict[str, Any] | File:
        match path:
            case ["metrics.json"]:
                return metrics_page(run.folder, params.get("after"))
            case ["events.json"]:
                return events_page(run.folder, params.get("after"))
            case ["logs.json"]:
                return logs_page(run)
            case ["timeline.json"]:
                window = Window(moment(params, "from", -math.inf), moment(params, "to", math.inf))
                return timeline_page(run.folder, window)
            case ["logs", name] if name.endswith(".json"):
                return log_page(run, name.removesuffix(".json"), number(params, "bytes", BYTES))
            case ["media", name]:
                found = media_file(run, name)
                if found is None:
                    raise unknown("media", name[:80], f" in run {run.name!r}")
                return File(*found)
            case ["seen", name] if name.endswith(".json"):
                return self._seen.page(run, name.removesuffix(".json"))
            case ["seen", name]:
                return File(*self._seen.file(run, name))
            case _:
                return self._of_journal(run, path, params)

    def _of_journal(self, run: ViewedRun, path: Sequence[str], params: Params) -> dict[str, Any]:
        journal = run.open_journal()
        match path:
            case ["run.json"]:
                return self._overviews.of(run, journal, self.summaries.of(run))
            case ["trajectories.json"]:
                return trajectories_page(journal, run.run, _query(params))
            case ["search.json"]:
                return search_page(journal, run.run, params.get("q", ""))
            case ["media.json"]:
                return media_page(run, journal, number(params, "after", 0), number(params, "limit", MEDIA, 1, MOST))
            case [("trajectories" | "groups") as what, name] if journal is not None and name.removesuffix(".json").isdecimal():
                episodes = self.episodes(run, journal)
                seq = int(name.removesuffix(".json")[:18])
                return episodes.trajectory(seq) if what == "trajectories" else episodes.group(seq)
        raise unknown("page", "/".join(path)[:200], f" of run {run.name!r}")


def known_run(source: Source, name: str) -> ViewedRun:
    """The run of a name.

    Raises:
        ApiError: there is none.
    """
    run = source.run(name)
    if run is None:
        raise unknown("run", name)
    return run


def _query(params: Params) -> TrajectoryQuery:
    step = number(params, "step", 0) if "step" in params else None
    after, limit = number(params, "after", 0), number(params, "limit", MOST // 2, 1, MOST)
    return TrajectoryQuery(after=after, step=step, sort="oldest", limit=limit)


def moment(params: Params, name: str, default: float) -> float:
    """A time of a query, Unix seconds.

    Raises:
        ApiError: it is none.
    """
    try:
        value = float(params[name]) if name in params else default
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise bad(f"{name} = {params[name][:40]!r}; allowed: Unix seconds", name)
    return value


def number(params: Params, name: str, default: int, least: int = 0, most: int = 1 << 53) -> int:
    """A whole number of a query.

    Raises:
        ApiError: it is none, or outside its range.
    """
    text = params.get(name, str(default))
    if not text.isdecimal() or len(text) > 16 or not least <= int(text) <= most:
        raise bad(f"{name} = {text[:40]!r}; allowed: a whole number, {least} to {most}", name)
    return int(text)
