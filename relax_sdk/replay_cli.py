"""`relax replay`: recorded episodes played and scored again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from relax_sdk.errors import ConfigError
from relax_sdk.recorded import Sort, TrajectoryFilter

app = typer.Typer()


@app.command(
    epilog="Examples:\n\nrelax replay runs/tone-v0-… --split eval\n\nrelax replay runs/tone-v0-… --episode train/12/3\n\n"
    "relax replay runs/tone-v0-… --episode train/12/3 --model run"
)
def replay(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    episode: Annotated[
        str | None, typer.Option(help="Play one episode again: its id (train/12/3), or its number, as the page shows it: 17.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --episode, sample again, too: 'run' takes the run's own weights; or a Hugging Face folder."),
    ] = None,
    env: Annotated[str | None, typer.Option(help="The environment, in place of what the folder names.")] = None,
    split: Annotated[str | None, typer.Option(help="Score only these again: train or eval.")] = None,
    sort: Annotated[Sort, typer.Option(help="With --limit: which ones.")] = "oldest",
    limit: Annotated[int | None, typer.Option(help="Episodes at most; default: all.")] = None,
    movers: Annotated[int, typer.Option(help="Episodes to name, those whose reward moved furthest.")] = 10,
    write: Annotated[Path | None, typer.Option(help="Also write the result there as JSON.")] = None,
) -> None:
    """Score recorded episodes again with today's rewards, without a model, and say what moved.

    With --episode play one of them again and say where it differs; exit code 1 where it does.
    """
    if episode is not None:
        if split or limit or write:
            raise ConfigError("--split, --limit and --write are for scoring many episodes again, without --episode")
        _replay_one(folder, episode, model, env)
        return
    if model is not None:
        raise ConfigError("--model samples one episode again: name it with --episode")
    from relax_sdk.rescoring import rescore

    done = rescore(folder, wanted=TrajectoryFilter(split=split, sort=sort, limit=limit), movers=movers, env=env)
    typer.echo(str(done))
    if write is not None:
        write.write_text(json.dumps(done.to_dict(), indent=1))


def _replay_one(folder: Path, episode: str, model: str | None, env: str | None) -> None:
    from relax_sdk.replay import replay_episode

    found = replay_episode(folder, episode, model=model, env=env)
    typer.echo(str(found))
    if not found.same:
        raise typer.Exit(1)
