"""`relax view`: the page over runs on this machine, or a static site of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def view(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, folders with runs in them, or the folder of a service.")
    ] = None,
    host: Annotated[str, typer.Option(help="Other machines reach it only at another address than this, and with --key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8100,
    key: Annotated[
        str | None,
        typer.Option(
            envvar="RELAX_VIEW_KEY", help="What callers must show; 'new' makes one and prints it.", show_default=False
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    bundle: Annotated[
        Path | None, typer.Option(help="Write a static site into this folder instead, which any file server can show.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --bundle: newest trajectories of each run, beside its worst and best.")
    ] = None,
) -> None:
    """Look at runs in a browser: curves, episodes, what the model heard and saw, token by token."""
    from relax_sdk.errors import ConfigError

    if missing := [path for path in runs or [] if not path.exists()]:
        raise ConfigError(f"there is no {missing[0]}; name a run folder, or a folder with runs in it")
    paths = runs or [Path("runs")]
    if limit is not None and bundle is None:
        raise ConfigError("--limit needs --bundle; the page that a server shows has all trajectories")
    if bundle is not None:
        from relax_server.viewer.bundle import write_bundle

        write_bundle(paths, bundle, limit)
        return
    from relax_server.viewer.serve import serve

    serve(paths, host, port, key, open_)
