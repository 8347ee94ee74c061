"""`relax eval`: plays an evaluation; `relax eval compare`: two of them side by side; `relax check-senses`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_sdk.cli_settings import SETTING_HELP, DefaultGroup, examples, parse_settings
from relax_sdk.config import EngineKind
from relax_sdk.errors import ConfigError
from relax_sdk.stop_signals import Interrupted, exit_code

PLAY = "play"


class PlayGroup(DefaultGroup):
    """A group whose command `play` needs no name: `relax eval tone-v0`."""

    default = PLAY


app = typer.Typer(cls=PlayGroup, no_args_is_help=True, help="Play the held-out tasks with a model, and compare models.")

senses_app = typer.Typer(no_args_is_help=True)


@app.command(
    name=PLAY,
    epilog=examples(
        "relax eval runs/tone-v0-… --limit 64",
        "relax eval tone-v0 --model relax/tiny-omni --samples 8",
        "relax eval tone-v0 --engine-url http://localhost:8000/v1 --engine-model qwen3",
        "relax eval compare evals/A evals/B",
    ),
)
def play(
    what: Annotated[str, typer.Argument(help="An environment (name, package.module:Class, file.py:Class) or a run's folder.")],
    model: Annotated[str | None, typer.Option(help="A built-in name or a Hugging Face folder.")] = None,
    split: Annotated[str, typer.Option(help="Which of the environment's tasks.")] = "eval",
    limit: Annotated[int | None, typer.Option(help="Tasks at most; more of them later go on in the same folder.")] = None,
    samples: Annotated[int, typer.Option(help="Episodes of each task, for pass@k.")] = 1,
    success: Annotated[float, typer.Option(help="Reward from which on an episode has succeeded.")] = 1.0,
    by: Annotated[str | None, typer.Option(help="Column of the task rows to score by; default: tag, tags or category.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Episodes at once; default: 16 with a URL.")] = None,
    out: Annotated[Path | None, typer.Option(help="The evaluation's folder; default: evals/ENV-MODEL-HASH.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Play again what was played already, in a folder beside.")] = False,
    env: Annotated[str | None, typer.Option(help="The environment, if the run cannot load it from where it came from.")] = None,
    engine: Annotated[EngineKind | None, typer.Option(help="What generates: embedded, sglang or vllm.")] = None,
    engine_flags: Annotated[str, typer.Option(help="More flags for SGLang or vLLM, as one text: '--tp 2'.")] = "",
    engine_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible URL; default: OPENAI_BASE_URL.")] = None,
    engine_model: Annotated[str | None, typer.Option(help="The model's name there.")] = None,
    api_key_env: Annotated[str, typer.Option(help="The variable that holds the key for it.")] = "OPENAI_API_KEY",
    seed: Annotated[int | None, typer.Option(help="Decides environments and samples.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help=SETTING_HELP)] = None,
) -> None:
    """Play a split with a model: of a run, of a folder, or behind any OpenAI-compatible URL.

    Killed and started again it goes on; tasks with episodes that failed are played again then.
    """
    from relax_sdk.evals.play import evaluate

    settings: dict[str, Any] = parse_settings(set_ or [])
    for name, value in (("engine", engine), ("seed", seed), ("engine_flags", shlex.split(engine_flags) or None)):
        if value is not None:
            settings[name] = value
    asked = find_model(model, engine_url, engine_model, api_key_env, concurrency)
    if concurrency is not None:
        settings["rollout"] = settings.get("rollout", {}) | {"concurrency": concurrency}
    try:
        report = evaluate(
            what,
            asked,
            split=split,
            limit=limit,
            samples=samples,
            success=success,
            by=by,
            env=env,
            out=out,
            fresh=fresh,
            **settings,
        )
    except Interrupted as stop:
        typer.echo("stopped; what was played is kept, and the same command goes on", err=True)
        sys.stdout.flush()
        os._exit(exit_code(stop))  # all is closed; taking down an interpreter with its libraries takes seconds
    typer.echo(report.to_markdown())
    typer.echo(f"evaluation: {_from_here(report.folder)}")


@app.command(epilog=examples("relax eval compare evals/A evals/B", "relax eval compare evals/A evals/B --json difference.json"))
def compare(
    first: Annotated[Path, typer.Argument(help="The folder of an evaluation, or its report.json: what is compared with.")],
    second: Annotated[Path, typer.Argument(help="The folder of another one of the same environment and split.")],
    success: Annotated[float | None, typer.Option(help="Reward from which on an episode has succeeded.")] = None,
    json: Annotated[Path | None, typer.Option(help="A file that gets everything, all flipped tasks included.")] = None,
) -> None:
    """Say in what two evaluations differ, paired by task, with intervals, and which tasks flipped."""
    import msgspec

    from relax_sdk.evals.compare import compare_evaluations
    from relax_sdk.evals.report import EvalReport, write_whole

    found = compare_evaluations(EvalReport.load(first), EvalReport.load(second), success)
    typer.echo(found.to_markdown())
    if json is not None:
        try:
            write_whole(json, msgspec.json.format(msgspec.json.encode(found.to_dict()), indent=1).decode())
        except OSError as error:
            raise ConfigError(f"--json {json} cannot be written ({error.strerror})") from error


@senses_app.command(
    name="check-senses",
    epilog=examples(
        "relax check-senses runs/tone-v0-…",
        "relax check-senses tone-v0 my-model-folder --limit 64",
        "relax check-senses tone-v0 --engine-url http://localhost:8000/v1 --engine-model qwen3",
    ),
)
def check(
    what: Annotated[str, typer.Argument(help="An environment (name, package.module:Class, file.py:Class) or a run's folder.")],
    model: Annotated[str | None, typer.Argument(help="A built-in name, a Hugging Face folder, or a run's folder.")] = None,
    split: Annotated[str, typer.Option(help="Which of the environment's tasks.")] = "eval",
    limit: Annotated[int | None, typer.Option(help="Tasks at most; default: 128. There are seven passes or more.")] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for the episodes and senses.json; default: one in evals/.")] = None,
    env: Annotated[str | None, typer.Option(help="The environment, if the run cannot load it from where it came from.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible URL; default: OPENAI_BASE_URL.")] = None,
    engine_model: Annotated[str | None, typer.Option(help="The model's name there.")] = None,
    api_key_env: Annotated[str, typer.Option(help="The variable that holds the key for it.")] = "OPENAI_API_KEY",
    concurrency: Annotated[int | None, typer.Option(help="Episodes at once; default: 16 with a URL.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help=SETTING_HELP)] = None,
) -> None:
    """Say whether a policy uses the images, sounds and films that it is shown; exit code 1 where it does not.

    The tasks are played with each kind of media blanked, shuffled between tasks and swapped with a neighbour's.
    """
    from relax_sdk.evals.check import check_senses

    settings: dict[str, Any] = parse_settings(set_ or [])
    asked = find_model(model, engine_url, engine_model, api_key_env, concurrency)
    if concurrency is not None:
        settings["rollout"] = settings.get("rollout", {}) | {"concurrency": concurrency}
    try:
        report = check_senses(what, asked, split=split, limit=limit, env=env, out=out, **settings)
    except Interrupted as stop:
        sys.stdout.flush()
        os._exit(exit_code(stop))
    typer.echo(report.to_markdown())
    if not report.ok:
        raise typer.Exit(1)


def find_model(model: str | None, url: str | None, named: str | None, key_env: str, concurrency: int | None) -> Any:
    """The model that the options of a command name: a name or a folder, an `Endpoint`, or None for that of the environment.

    Raises:
        ConfigError: options that do not go together, or a variable that there is not.
    """
    from relax_sdk.endpoint import API_KEY, Endpoint

    if url is None and named is None:
        if key_env != API_KEY:
            raise ConfigError("--api-key-env needs --engine-url or --engine-model")
        return model
    if model is not None:
        raise ConfigError("--model starts an engine here; with --engine-url name the model there with --engine-model")
    if named is None:
        raise ConfigError("name the model at the URL with --engine-model")
    key = os.environ.get(key_env)
    if key_env != API_KEY and not key:
        raise ConfigError(f"--api-key-env {key_env}: there is no such variable, or it is empty")
    return Endpoint(url or "", named, key, concurrency or 16)


def _from_here(folder: Path | None) -> Path | None:
    """A folder as it is named in the current one, where it lies in that."""
    here = Path.cwd()
    return folder.relative_to(here) if folder is not None and folder.is_relative_to(here) else folder
