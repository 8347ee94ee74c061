"""`relax admin`: copies of a service's data, and upgrades of its journal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

FOLDER = Path("runs/service")

app = typer.Typer(no_args_is_help=True, help="Copies of a service's data, and upgrades of its journal.")

Folder = Annotated[Path, typer.Option(help="The service's folder.")]
Journal = Annotated[
    str | None,
    typer.Option(envvar="RELAX_JOURNAL", help="URL of its database; default: the file in the folder.", show_default=False),
]


@app.command("backup")
def make_backup(
    to: Annotated[Path, typer.Argument(help="A new folder.")], folder: Folder = FOLDER, journal: Journal = None
) -> None:
    """Copy journal, media and runs while the service runs."""
    from relax_server.api.backup import backup

    made = backup(folder, journal, to, _say)
    _say(f"the {made.journal} journal and {_files(to)} files are in {to}")


@app.command("restore")
def bring_back(
    source: Annotated[Path, typer.Argument(help="A folder that `relax admin backup` made.")],
    folder: Folder = FOLDER,
    journal: Journal = None,
) -> None:
    """Bring a copy back into a new folder, and an empty database."""
    from relax_server.api.backup import restore

    made = restore(source, folder, journal, _say)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(made.made_at))
    _say(f"the state of {when} is in {folder}; start it with `relax serve --folder {folder}`")


@app.command()
def migrate(
    folder: Folder = FOLDER,
    journal: Journal = None,
    check: Annotated[bool, typer.Option("--check", help="Only say whether it is needed; then the exit code is 1.")] = False,
) -> None:
    """Bring the journal to this version's schema; the service does it too when it starts."""
    from relax_server.journal import open_journal, revision_of
    from relax_server.journal.schema import HEAD

    where = journal or str(folder / "journal.db")
    found = revision_of(where)
    if check:
        _say(f"{where} is at revision {found}; this version wants {HEAD}")
        raise typer.Exit(0 if found == HEAD else 1)
    open_journal(where).close()
    _say(f"{where}: {found} → {HEAD}" if found != HEAD else f"{where} is at revision {HEAD} already")


def _files(folder: Path) -> int:
    return sum(file.is_file() for file in folder.rglob("*"))


def _say(text: str) -> None:
    typer.echo(f"relax admin: {text}", err=True)
