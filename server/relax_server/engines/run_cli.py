"""`relax engine list|add|remove`: the engines of a training run, while it goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_sdk.control import RunControl
from relax_sdk.errors import EngineError

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that goes on.", show_default=False)]

COLUMNS = ("id", "kind", "state", "url", "version", "running", "answered", "failed", "reason")
STYLES = {"current": "green", "starting": "yellow", "draining": "yellow", "out": "red", "lost": "red"}
START_SECONDS = 900.0
"""Seconds for an engine to be in use; SGLang may take minutes."""
SPARE_SECONDS = 60.0
"""Seconds beyond its drain limit, for an engine to be gone."""


def list_(folder: Folder) -> None:
    """List the engines of a run."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    with RunControl(folder) as control:
        engines = control.list()
    table = Table(*COLUMNS)
    for engine in engines:
        shown = engine | {"kind": engine["kind"] + (" (elsewhere)" if engine["external"] else "")}
        shown["reason"] = engine["reason"].partition("\n")[0]
        words = ("" if shown[name] is None else str(shown[name]) for name in COLUMNS)
        table.add_row(*(Text(word, STYLES.get(word, "")) for word in words))
    Console().print(table)


def add(
    folder: Folder,
    id: Annotated[
        str | None, typer.Option(help="The engine's name; one of that name that is there already stays as it is.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="URL of an engine that runs already; without it, one is started.")] = None,
    kind: Annotated[str | None, typer.Option(help="Kind of the engine at --url, if another than the run's own.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token of the engine at --url, if it is not found on this machine.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="How the engine at --url gets weights: folder (it can read the run's), or broadcast (SGLang only)."),
    ] = None,
) -> None:
    """Add an engine to a run; it is used once it has the current weights."""
    from relax_server.engines.tokens import read_token

    token = read_token(token_file) if url is not None else ""
    with RunControl(folder) as control:
        name = control.add(id, url, kind, token or None, weights)["id"]
        said = f"engine {name} is starting, and gets the current weights"
        engine = _follow(control, name, said, lambda state: state not in ("starting",), START_SECONDS)
    if engine["state"] in ("current", "out"):
        typer.echo(f"engine {name} is in use at {engine['url']}, with weights of version {engine['version']}")
    else:
        raise EngineError(f"engine {name} is {engine['state']}: {engine['reason'] or f'not ready in {START_SECONDS:.0f} s'}")


def remove(
    folder: Folder,
    id: Annotated[str, typer.Argument(help="The engine's name.", show_default=False)],
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds for its calls in flight; the rest begins again elsewhere.")
    ] = 60.0,
) -> None:
    """Remove an engine from a run, once its calls in flight are done."""
    with RunControl(folder) as control:
        control.remove(id, drain_seconds)
        said = f"engine {id} finishes what it has"
        engine = _follow(control, id, said, lambda state: state != "draining", drain_seconds + SPARE_SECONDS)
    if engine["state"] == "draining":
        raise EngineError(
            f"engine {id} is still draining after {drain_seconds + SPARE_SECONDS:.0f} s; relax engine list {folder}"
        )
    typer.echo(f"engine {id} is gone")


def _follow(control: RunControl, id: str, said: str, until: Callable[[str], bool], seconds: float) -> dict[str, Any]:
    """Show a live word with the seconds while an engine is on its way."""
    from rich.console import Console

    began = time.monotonic()
    with Console(stderr=True).status(said) as status:

        def sleep(pause: float) -> None:
            status.update(f"{said} · {time.monotonic() - began:.0f} s")
            time.sleep(pause)

        return control.wait(id, until, seconds, sleep)


def add_commands(app: typer.Typer) -> None:
    """Add these commands to `relax engine`."""
    app.command("list")(list_)
    app.command("add")(add)
    app.command("remove")(remove)
