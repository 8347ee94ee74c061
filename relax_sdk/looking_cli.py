"""Commands that show a run's episodes token by token, and write its model or its episodes: `explain-mask`, `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_sdk.cli_settings import DefaultGroup, examples
from relax_sdk.exporting import ExportFormat
from relax_sdk.recorded import Sort, TrajectoryFilter

MODEL = "model"


class ExportGroup(DefaultGroup):
    """A group whose command `model` needs no name: `relax export runs/tone-v0-… --to my-model`."""

    default = MODEL


app = typer.Typer()
export_app = typer.Typer(
    cls=ExportGroup, no_args_is_help=True, help="Write a run's model, or what it has recorded, for other tools."
)
app.add_typer(export_app, name="export")


@app.command(name="explain-mask", epilog="Example:\n\nrelax explain-mask runs/tone-v0-… train/12/3")
def explain(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    episode: Annotated[
        str, typer.Argument(help="Id of an episode, or its beginning: train/12/3; or its number, as the page shows it: 17.")
    ],
) -> None:
    """Show an episode token by token: what was given (mask 0), what the policy wrote (mask 1), and why."""
    from rich.console import Console
    from rich.text import Text

    from relax_sdk.mask import explain_mask

    found = explain_mask(folder, episode)
    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(found.headline))
    for number in range(len(found.samples)):
        if len(found.samples) > 1:
            console.print(Text(f"sample {number}:", style="bold"))
        for line in found.lines(number):
            console.print(Text(str(line), style="green" if line.first.mask else "dim"))


@export_app.command(
    name=MODEL,
    epilog=examples(
        "relax export runs/tone-v0-… --to my-model",
        "relax export runs/tone-v0-… --to my-model --checkpoint 50 --shard-size 2GB",
        "relax export trajectories --help",
    ),
)
def model(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    to: Annotated[Path, typer.Option(help="A folder that does not exist yet.")],
    checkpoint: Annotated[
        int | None, typer.Option(help="Step of a checkpoint that the run has kept; default: the last.")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="Size of one file of weights at most: 2GB, 500MiB.")] = "5GB",
) -> None:
    """Write the model of a run as a Hugging Face folder; `relax export trajectories` writes episodes."""
    from relax_sdk.model_export import export_model

    typer.echo(str(export_model(folder, to, checkpoint=checkpoint, shard_size=shard_size)))


@export_app.command(
    epilog="Examples:\n\nrelax export trajectories runs/tone-v0-… --to episodes --split eval\n\n"
    "relax export trajectories runs/tone-v0-… --to sft --format sft --reward-min 1"
)
def trajectories(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    to: Annotated[Path, typer.Option(help="A folder that does not exist yet.")],
    format: Annotated[
        ExportFormat,
        typer.Option(help="datasets: Hugging Face; sft, preferences: training data; tokens; inspect: Inspect's log."),
    ] = "datasets",
    split: Annotated[str | None, typer.Option(help="train, eval, warmup or failed.")] = None,
    status: Annotated[list[str] | None, typer.Option(help="completed, truncated, failed …; may be repeated.")] = None,
    reward_min: Annotated[float | None, typer.Option()] = None,
    reward_max: Annotated[float | None, typer.Option()] = None,
    text: Annotated[str | None, typer.Option(help="Words that occur in the episode.")] = None,
    task: Annotated[int | None, typer.Option(help="Index of a task.")] = None,
    step: Annotated[int | None, typer.Option(help="The optimizer step that trained on them.")] = None,
    sort: Annotated[Sort, typer.Option()] = "oldest",
    limit: Annotated[int | None, typer.Option(help="Episodes at most; default: all.")] = None,
    margin: Annotated[float, typer.Option(help="preferences: rewards of a pair are apart by more than this.")] = 0.0,
    pairs: Annotated[int, typer.Option(help="preferences: pairs of a group at most.")] = 1,
    env: Annotated[str | None, typer.Option(help="The environment, in place of what the folder names.")] = None,
) -> None:
    """Write episodes, with their media, into a folder that other tools read."""
    from relax_sdk.exporting import export_trajectories

    wanted = TrajectoryFilter(split, status, (reward_min, reward_max), task, step, text, sort, limit)
    done = export_trajectories(folder, to, format, wanted=wanted, margin=margin, pairs=pairs, env=env)
    typer.echo(str(done))
