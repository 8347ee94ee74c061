"""Run folders, folders of them, and the folder of a service, as the user whose files they are sees them: all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from relax_sdk.errors import ConfigError, JournalError
from relax_sdk.evals.plan import PLAN
from relax_sdk.run import CONFIG
from relax_server.viewer.base import ViewedRun
from relax_server.viewer.journals import Journals
from relax_server.viewer.named import named_model, served_model

JOURNAL, MEDIA = "journal.db", "media"
MODELS = ("hf", "reference")
"""Model folders of a run that is over or has its reference, whose tokenizers are the same."""


class FolderSource:
    """Runs in folders; those that appear later are found too.

    Args:
        paths: run folders, folders with run folders in them, or the folder of a service; one that is not there yet is empty.
        journals: where journals are opened.

    Raises:
        ConfigError: a path is a file.
    """

    def __init__(self, paths: Sequence[Path], journals: Journals) -> None:
        self._paths = [path.absolute() for path in paths]
        self._journals = journals
        if files := [path for path in self._paths if path.is_file()]:
            raise ConfigError(f"{files[0]} is a file; name a run folder, or a folder with runs in it")

    def runs(self) -> Sequence[ViewedRun]:
        """See `Source.runs`."""
        return list(self._named().values())

    def run(self, name: str) -> ViewedRun | None:
        """See `Source.run`."""
        return self._named().get(name)

    def _named(self) -> dict[str, ViewedRun]:
        named: dict[str, ViewedRun] = {}
        for run in self._found():
            name, again = run.name, 1
            while name in named:  # of another parent folder
                again += 1
                name = f"{run.name} ({again})"
            named[name] = run if name == run.name else ViewedRun(**{**vars(run), "name": name})
        return named

    def _found(self) -> Iterator[ViewedRun]:
        seen: set[Path] = set()
        for path in self._paths:
            if is_run(path):
                yield from self._once(path, seen)
                continue
            inner = sorted(child for child in _children(path) if is_run(child))
            if (path / JOURNAL).is_file():
                yield from self._of_service(path)
                inner += sorted(child for child in _children(path / "runs") if is_run(child))
            for child in inner:
                yield from self._once(child, seen)

    def _once(self, folder: Path, seen: set[Path]) -> Iterator[ViewedRun]:
        if folder not in seen:
            seen.add(folder)
            yield run_in(folder, self._journals)

    def _of_service(self, folder: Path) -> Iterator[ViewedRun]:
        """Rollouts and sessions in the journal of a service."""
        opened = partial(self._journals.open, folder / JOURNAL)
        try:
            journal = opened()
            names = journal.runs() if journal is not None else []
        except JournalError:
            return  # told by `relax view` when it starts, and by the service itself
        for name in names:
            yield ViewedRun(name, None, name, opened, folder / MEDIA, named=partial(served_model, folder))


def run_in(folder: Path, journals: Journals, shows_paths: bool = True) -> ViewedRun:
    """The run in a run folder; `shows_paths` as in `ViewedRun`."""
    where, own = _journal_of(folder)
    return ViewedRun(
        folder.name,
        folder,
        folder.name,
        partial(journals.open, where, folder if own else None),
        folder / MEDIA,
        (*(folder / name for name in MODELS), *_evaluated(folder)),
        shows_paths,
        replay=str(folder),
        named=partial(named_model, folder),
    )


def _evaluated(folder: Path) -> Iterator[Path]:
    """The model folder of an evaluation: its note has the path, a space and the weights' hash."""
    noted = read_json(folder / PLAN)
    weights = noted.get("weights") if isinstance(noted, dict) else None
    if isinstance(weights, str):
        yield Path(weights.rpartition(" ")[0])


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    config = read_json(folder / CONFIG)
    return isinstance(config, dict) and "env" in config


def read_json(file: Path) -> Any:
    """What a JSON file holds; None: it is not there, or not whole."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _journal_of(folder: Path) -> tuple[str | Path, bool]:
    """Where the journal of a run is, and whether it is the run's alone."""
    ray = (read_json(folder / CONFIG) or {}).get("ray")
    url = ray.get("journal") if isinstance(ray, dict) else None
    return (url, False) if isinstance(url, str) else (folder / JOURNAL, True)


def _children(folder: Path) -> list[Path]:
    try:
        return [child for child in folder.iterdir() if child.is_dir()]
    except OSError:
        return []
