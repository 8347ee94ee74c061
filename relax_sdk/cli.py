"""The `relax` command."""

from __future__ import annotations

import os
import shlex
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from relax_sdk.client.transport import URL
from relax_sdk.config import BusName, EngineKind, Mode
from relax_sdk.errors import ConfigError, EnvError, RelaxError, raised
from relax_sdk.messages import Message, Text
from relax_sdk.printable import printable
from relax_sdk.runtime import Provide
from relax_sdk.stop_signals import Interrupted, exit_code


def examples(*commands: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(("Examples:", *commands))


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog=examples("relax train tone-v0 --steps 100", "relax eval runs/tone-v0-…", "relax doctor runs/tone-v0-…"),
)
envs_app = typer.Typer(no_args_is_help=True, help="Environments.")
app.add_typer(envs_app, name="envs")

COMMANDS = "relax.commands"
SETTING_HELP = "A setting by its name in RunConfig, e.g. --set rollout.group_size=8; may be repeated."


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
    set_: Annotated[list[str] | None, typer.Option("--set", help=SETTING_HELP)] = None,
    runtime: Annotated[str, typer.Option(help="local: this machine; ray: a Ray cluster.")] = "local",
    bus: Annotated[BusName, typer.Option(help="How groups reach the trainer: local, or transfer_queue on Ray.")] = "local",
    server: Annotated[str | None, typer.Option(help="URL of a rollout service that carries the run out.")] = None,
    key: Annotated[str | None, typer.Option(envvar="RELAX_KEY", help="A key of the service.", show_default=False)] = None,
    provide: Annotated[Provide | None, typer.Option(help="How the service gets the environment.")] = None,
) -> None:
    """Train a model on an environment."""
    from relax_sdk.trainer import Trainer

    if resume is not None:
        service: dict[str, Any] = dict(server=server, key=key if server else None, provide=provide)
        trainer = Trainer.from_run(resume, env, change=parse_settings(set_ or []), runtime=runtime, **service)
    elif env is None:
        raise ConfigError("name an environment (see `relax envs list`) or a folder with --resume")
    else:
        settings: dict[str, Any] = parse_settings(set_ or [])
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


@app.command(
    name="eval",
    epilog=examples(
        "relax eval runs/tone-v0-… --limit 64", "relax eval tone-v0 --engine-url http://localhost:8000/v1 --engine-model qwen3"
    ),
)
def evaluate(
    what: Annotated[str, typer.Argument(help="A run folder; with --engine-url, an environment.")],
    split: Annotated[str, typer.Option()] = "eval",
    limit: Annotated[int | None, typer.Option()] = None,
    env: Annotated[str | None, typer.Option(help="The environment, if the run cannot load it from where it came from.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="An OpenAI-compatible URL, usually ending in /v1.")] = None,
    engine_model: Annotated[str | None, typer.Option(help="The model's name there.")] = None,
    api_key_env: Annotated[str | None, typer.Option(help="The variable that holds the key for it.")] = None,
    concurrency: Annotated[int, typer.Option(help="Episodes at once, with --engine-url.")] = 16,
    save: Annotated[Path | None, typer.Option(help="With --engine-url: a file for the trajectories, JSON lines.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help=SETTING_HELP)] = None,
) -> None:
    """Play a split greedily with a trained model, or with a model behind any OpenAI-compatible URL."""
    if engine_url is not None:
        _evaluate_endpoint(what, split, limit, engine_url, engine_model, api_key_env, concurrency, save, set_ or [])
        return
    if engine_model or api_key_env or save or set_:
        raise ConfigError("--engine-model, --api-key-env, --save and --set need --engine-url")
    from relax_sdk.run import Run

    with Run.load(Path(what), env) as run:
        typer.echo(f"{run.config.env} [{split}]: {run.evaluate(split, limit)}")


def _evaluate_endpoint(
    env: str,
    split: str,
    limit: int | None,
    url: str,
    model: str | None,
    key_env: str | None,
    concurrency: int,
    save: Path | None,
    settings: list[str],
) -> None:
    from relax_sdk.endpoint import Endpoint

    if model is None:
        raise ConfigError("name the model at the URL with --engine-model")
    key = os.environ.get(key_env) if key_env else None
    if key_env and not key:
        raise ConfigError(f"--api-key-env {key_env}: there is no such variable, or it is empty")
    result = Endpoint(url, model, key, concurrency).evaluate(env, split, limit, progress=True, **parse_settings(settings))
    typer.echo(f"{env} [{split}] with {model}: {result}")
    for name, mean in result.components.items():
        typer.echo(f"  {name}: {mean:.3f}")
    if save is not None:
        save.write_bytes(b"".join(msgspec.json.encode(trajectory) + b"\n" for trajectory in result.trajectories))
        typer.echo(f"trajectories, without tokens: {save}")


@app.command(
    epilog=examples(
        "relax replay runs/tone-v0-… --episode train/12/3", "relax replay runs/tone-v0-… --episode train/12/3 --model run"
    )
)
def replay(
    folder: Annotated[Path, typer.Argument(help="A run folder.")],
    episode: Annotated[str, typer.Option(help="Id of the episode, or its beginning: train/12/3.")],
    model: Annotated[
        str | None, typer.Option(help="Sample again, too: 'run' takes the run's own weights; or a Hugging Face folder.")
    ] = None,
    env: Annotated[str | None, typer.Option(help="The environment, in place of what the folder names.")] = None,
) -> None:
    """Play one recorded episode again and say where it differs; exit code 1 where it does."""
    from relax_sdk.replay import replay_episode

    found = replay_episode(folder, episode, model=model, env=env)
    typer.echo(str(found))
    if not found.same:
        raise typer.Exit(1)


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
        from relax_sdk.runtime import find_runtime

        config = run_config_from_dict({"env": "", "engines": engines, **parse_settings(set_ or [])})
        findings = find_runtime(runtime).examine(folder or Path(), config)
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


WORDS = {"true": True, "false": False, "none": None, "null": None}
"""Values as YAML and JSON write them; Python's own forms are read too."""


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


def parse_settings(settings: list[str]) -> dict[str, dict[str, Any]]:
    """`["rollout.group_size=8"]` as `{"rollout": {"group_size": 8}}`.

    Raises:
        ConfigError: not of the form `section.field=value`, or there is no such section.
    """
    import ast

    from relax_sdk.trainer import SECTIONS

    out: dict[str, dict[str, Any]] = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        section, dot, name = path.partition(".")
        if not (equals and dot and name):
            raise ConfigError(f"--set {setting!r}: write it as section.field=value, e.g. rollout.group_size=8")
        if section not in SECTIONS:
            raise ConfigError(f"--set {setting!r}: no section {section!r}; there are {', '.join(SECTIONS)}")
        try:
            value = WORDS[text] if text in WORDS else ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        out.setdefault(section, {})[name] = value
    return out


def add_commands() -> None:
    """Add the commands that look at a service, and those of installed packages: typer applications in `relax.commands`."""
    from relax_sdk.client.cli import app as service

    app.add_typer(service)
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
