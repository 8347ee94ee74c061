"""The `relax` command."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

import typer

from relax_sdk.cli_settings import SETTING_HELP, examples, parse_settings
from relax_sdk.client.transport import URL
from relax_sdk.config import BusName, EngineKind, Mode
from relax_sdk.errors import ConfigError, EnvError, RelaxError, raised
from relax_sdk.evals.cli import app as evals_app
from relax_sdk.evals.cli import senses_app
from relax_sdk.messages import Message, Text
from relax_sdk.printable import printable
from relax_sdk.runtime import Provide
from relax_sdk.stop_signals import Interrupted, exit_code

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=examples("relax train tone-v0 --steps 100", "relax eval runs/tone-v0-…", "relax doctor runs/tone-v0-…"),
)
envs_app = typer.Typer(no_args_is_help=True, help="Environments.")
app.add_typer(envs_app, name="envs")
app.add_typer(evals_app, name="eval")
app.add_typer(senses_app)

COMMANDS = "relax.commands"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"relax-gym {version('relax-gym')}")
        raise typer.Exit


@app.callback()
def relax(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Write environments of text, images, audio and video, and train models on them."""


@app.command(
    epilog=examples(
        "relax train tone-v0 --steps 100 --set rollout.group_size=8",
        "relax train my_envs:MyEnv --model ~/models/Qwen3-0.6B",
        "relax train --resume runs/tone-v0-…",
    )
)
def train(
    env: Annotated[str | None, typer.Argument(help="A registered name, package.module:Class or file.py:Class.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    model: Annotated[str | None, typer.Option(help="A built-in name or a Hugging Face folder.")] = None,
    mode: Annotated[Mode | None, typer.Option(help="async or colocate.")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="0 is on-policy.")] = None,
    engine: Annotated[EngineKind | None, typer.Option(help="What generates: embedded, sglang or vllm.")] = None,
    engine_flags: Annotated[str, typer.Option(help="More flags for SGLang or vLLM, as one text: '--tp 2'.")] = "",
    seed: Annotated[int, typer.Option()] = 0,
    engines: Annotated[int, typer.Option(help="Inference engines.")] = 1,
    folder: Annotated[Path | None, typer.Option(help="Folder in which the run is kept.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    check_senses: Annotated[
        bool,
        typer.Option("--check-senses", help="At the end, say whether the policy uses what it is shown: eval.check_senses."),
    ] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", help=SETTING_HELP)] = None,
    runtime: Annotated[str, typer.Option(help="local: this machine; ray: a Ray cluster.")] = "local",
    bus: Annotated[BusName, typer.Option(help="How groups reach the trainer: local, or transfer_queue on Ray.")] = "local",
    tracker: Annotated[
        list[str] | None, typer.Option(help="Shows the run, besides TensorBoard: wandb, mlflow, prometheus; may be repeated.")
    ] = None,
    traces: Annotated[str | None, typer.Option(help="URL of a receiver of OpenTelemetry traces over HTTP.")] = None,
    server: Annotated[str | None, typer.Option(help="URL of a rollout service that carries the run out.")] = None,
    key: Annotated[str | None, typer.Option(envvar="RELAX_KEY", help="A key of the service.", show_default=False)] = None,
    provide: Annotated[Provide | None, typer.Option(help="How the service gets the environment.")] = None,
) -> None:
    """Train a model on an environment."""
    from relax_sdk.trainer import Trainer

    settings: dict[str, Any] = parse_settings(set_ or [])
    if check_senses:
        settings.setdefault("eval", {})["check_senses"] = True
    if tracker:
        tracking = settings.setdefault("tracking", {})
        tracking["trackers"] = list(dict.fromkeys([*tracking.get("trackers", ("tensorboard",)), *tracker]))
    if traces is not None:
        settings.setdefault("tracking", {})["traces"] = traces
    if resume is not None:
        service: dict[str, Any] = dict(server=server, key=key if server else None, provide=provide)
        trainer = Trainer.from_run(resume, env, change=settings, runtime=runtime, **service)
    elif env is None:
        raise ConfigError("name an environment (see `relax envs list`) or a folder with --resume")
    else:
        trainer = Trainer(
            env,
            model,
            mode=mode,
            max_staleness=max_staleness,
            engine=engine,
            engine_flags=shlex.split(engine_flags),
            seed=seed,
            engines=engines,
            folder=folder,
            runtime=runtime,
            bus=bus,
            server=server,
            key=key if server else None,
            provide=provide,
            **settings,  # type: ignore[arg-type]
        )
    try:
        run = trainer.fit(steps, resume=resume is not None)
    except Interrupted as stop:
        sys.stdout.flush()
        os._exit(exit_code(stop))  # all is closed; taking down an interpreter with its libraries takes seconds
    last = next((row for row in reversed(run.metrics) if "eval_reward" in row), None)
    if last is not None:
        typer.echo(f"held-out reward {last['eval_reward']:.3f} ± {last['eval_ci95']:.3f} on {last['eval_n']} tasks")
    typer.echo(f"run folder: {run.folder}")


@app.command(epilog=examples("relax doctor", "relax doctor runs/tone-v0-…", "relax doctor --runtime ray"))
def doctor(
    folder: Annotated[Path | None, typer.Argument(help="A run folder; without it, this machine.")] = None,
    runtime: Annotated[str | None, typer.Option(help="ray: can the cluster carry out runs kept in FOLDER?")] = None,
    engines: Annotated[int, typer.Option(help="Engines of the runs that the cluster is looked at for.")] = 1,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of these runs, e.g. --set ray.address=HOST:PORT.")
    ] = None,
) -> None:
    """Say what held a run back, or whether this machine or a cluster can train."""
    from relax_sdk.doctor import examine_machine, examine_run

    if runtime is not None:
        from relax_sdk.config import run_config_from_dict
        from relax_sdk.progress import Waiting
        from relax_sdk.runtime import find_runtime

        config = run_config_from_dict({"env": "", "engines": engines, **parse_settings(set_ or [])})
        found = find_runtime(runtime)
        with Waiting(f"examining runtime {runtime}"):
            findings = found.examine(folder or Path(), config)
    elif folder is None:
        findings = examine_machine()
    else:
        findings = examine_run(folder)
    for finding in findings:
        typer.echo(str(finding))
    problems, notes = (sum(finding.level == level for finding in findings) for level in ("problem", "note"))
    typer.echo(
        f"{problems} {'problem' if problems == 1 else 'problems'}, {notes} {'thing' if notes == 1 else 'things'} to look at"
    )
    if folder is not None and runtime is None and (folder / "timeline.json").exists():
        typer.echo(f"what happened when: open {folder / 'timeline.json'} in ui.perfetto.dev or chrome://tracing")
    if problems:
        raise typer.Exit(1)


@envs_app.command(name="list")
def list_() -> None:
    """List the registered environments."""
    from rich.console import Console
    from rich.table import Table

    from relax_sdk.registry import list_envs

    table = Table("name", "modalities", "what")
    for spec in list_envs():
        cls = spec.load()
        table.add_row(spec.id, ", ".join(sorted(cls.modalities)) or "text", (cls.__doc__ or "").strip().split("\n")[0])
    Console().print(table)


@envs_app.command()
def host(
    env: Annotated[str, typer.Argument(help="A registered name, package.module:Class or file.py:Class.")],
    server: Annotated[str, typer.Option(envvar="RELAX_URL", help="URL of the rollout service.")] = URL,
    key: Annotated[str | None, typer.Option(envvar="RELAX_KEY", show_default=False)] = None,
    id: Annotated[str | None, typer.Option(help="The environment's name there.")] = None,
) -> None:
    """Let a rollout service step an environment of this machine, until Ctrl-C."""
    from relax_sdk.hosting import host as host_env

    with host_env(env, server, key, id=id or env.rpartition(":")[2]) as hosting:
        typer.echo(f"hosting {hosting.id} for {server}; Ctrl-C ends it", err=True)
        hosting.wait()


@envs_app.command()
def upload(
    env: Annotated[str, typer.Argument(help="A registered name, package.module:Class or file.py:Class.")],
    server: Annotated[str, typer.Option(envvar="RELAX_URL", help="URL of the rollout service.")] = URL,
    key: Annotated[
        str | None, typer.Option(envvar="RELAX_KEY", help="A key with the right to upload.", show_default=False)
    ] = None,
    id: Annotated[str | None, typer.Option(help="The environment's name there.")] = None,
) -> None:
    """Send an environment's code to a rollout service, where it runs in a worker process."""
    from relax_sdk.client import Client

    with Client(server, key) as client:
        about = client.upload_env(env, id=id or env.rpartition(":")[2])
    typer.echo(f"{about['id']} can be played at {server}: splits {about['splits']}")


@envs_app.command(epilog=examples("relax envs show tone-v0", "relax envs show my_envs:MyEnv"))
def show(env: Annotated[str, typer.Argument()]) -> None:
    """Show an environment: its tasks, tools, defaults and first observation."""
    import inspect

    from relax_sdk.messages import as_messages
    from relax_sdk.registry import get_spec
    from relax_sdk.sync_env import SyncEnv
    from relax_sdk.tasks import task_splits
    from relax_sdk.tools import tool_schemas

    spec = get_spec(env)
    cls = spec.load()
    typer.echo(f"{spec.id}: {inspect.getdoc(cls) or ''}\n")
    for name, split in task_splits(spec.load_tasks()).items():
        typer.echo(f"split {name}: {f'{len(split):,} tasks' if split.finite else 'a generator'}")
    typer.echo(f"tools: {[schema['function']['name'] for schema in tool_schemas(spec.make())] or 'none'}")
    typer.echo(f"defaults: {spec.defaults}")
    try:
        observation, _ = SyncEnv(spec.make()).reset(seed=0, options={"task": spec.splits()["train"].row(0)})
        messages = as_messages(observation)
    except RelaxError:
        raise
    except Exception as error:
        raise EnvError(f"{spec.id}: reset of the first task {raised(error)}") from error
    typer.echo("first observation:")
    prompt = [f"  system: {cls.system_prompt}"] if cls.system_prompt is not None else []
    typer.echo("\n".join([*prompt, *(f"  {message.role}: {_shown(message)}" for message in messages)]))


def _shown(message: Message) -> str:
    """A message for people: its texts, and its media in words."""
    parts = []
    for part in message.content:
        if isinstance(part, Text):
            parts.append(part.text)
            continue
        ref = part.ref
        size = f" {ref.width}×{ref.height}" if ref.width else ""
        seconds = f" {ref.duration:.2f} s" if ref.duration is not None else ""
        parts.append(f"<{ref.kind}{size}{seconds}, {ref.mime}, {ref.size:,} bytes>")
    return " ".join(parts).replace("\n", "\n    ")


def add_commands() -> None:
    """Add the commands that look at a service and at records, and those of installed packages: typer applications in
    `relax.commands`."""
    from relax_sdk.client.cli import app as service
    from relax_sdk.looking_cli import app as looking
    from relax_sdk.planning_cli import app as planning
    from relax_sdk.replay_cli import app as replay

    app.add_typer(service)
    app.add_typer(looking)
    app.add_typer(planning)
    app.add_typer(replay)
    for point in entry_points(group=COMMANDS):
        app.add_typer(point.load())


def main() -> None:
    """Run the command; an expected error is one line and exit code 1."""
    try:
        add_commands()
        app()
    except RelaxError as error:
        typer.echo(printable(f"{type(error).__name__}: {error}"), err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
