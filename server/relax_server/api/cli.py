"""Commands of the service: `relax serve`, `relax keys`, `relax admin`, `relax engine` and `relax view`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from relax_server.api.admin_cli import app as admin_app
from relax_server.engines.cli import app as engine_app
from relax_server.viewer.cli import app as view_app

FOLDER = Path("runs/service")

app = typer.Typer()
keys_app = typer.Typer(no_args_is_help=True, help="Keys of the rollout service.")
app.add_typer(keys_app, name="keys")
app.add_typer(engine_app, name="engine")
app.add_typer(admin_app, name="admin")
app.add_typer(view_app)

Folder = Annotated[Path, typer.Option(help="The service's folder: journal, media, logs.")]


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="A built-in name or a Hugging Face folder.")] = "relax/tiny-omni",
    host: Annotated[str, typer.Option(help="Other machines reach it only at another address than this, and with a key.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    no_keys: Annotated[
        bool, typer.Option("--no-keys", help="Ask for no key though keys were made; at an address of this machine alone.")
    ] = False,
    folder: Folder = FOLDER,
    engine: Annotated[list[str] | None, typer.Option(help="URL of an engine that runs; may be repeated.")] = None,
    engine_token_file: Annotated[
        Path | None,
        typer.Option(help="File with the token of these engines; default: $RELAX_ENGINE_TOKEN, or theirs on this machine."),
    ] = None,
    media_paths: Annotated[
        bool, typer.Option(help="The engines can read FOLDER/media: send them paths, not bytes with every call.")
    ] = False,
    journal: Annotated[str | None, typer.Option(help="Database URL; default: a file in the folder.")] = None,
    name: Annotated[str, typer.Option(help="Ends the ids of its sessions, for a proxy in front of several services.")] = "",
    threads: Annotated[int, typer.Option(help="Threads of the engine that is started.")] = 1,
    workers: Annotated[
        int, typer.Option(help="Processes that answer requests, for a machine with several cores; they share everything else.")
    ] = 1,
    drain_seconds: Annotated[float, typer.Option(help="Seconds for what is under way when it is told to end.")] = 10.0,
    keep_events_days: Annotated[float, typer.Option(help="Events of what ended longer ago are pruned.")] = 30.0,
    concurrency: Annotated[int, typer.Option(help="Episodes at once, over all keys.")] = 4096,
    idle_timeout: Annotated[float, typer.Option(help="Seconds without a call after which a session is cancelled.")] = 600.0,
    max_body: Annotated[int, typer.Option(help="Bytes of a request that carries media or code.")] = 64 << 20,
    max_json: Annotated[int, typer.Option(help="Bytes of any other request.")] = 4 << 20,
    max_log: Annotated[int, typer.Option(help="Bytes of a log file in the folder; so much before it is kept, too.")] = 64 << 20,
    max_connections: Annotated[int, typer.Option(help="Open connections; open files may allow fewer.")] = 16_384,
    max_connections_per_address: Annotated[int, typer.Option(help="Open connections of one address.")] = 8192,
    header_seconds: Annotated[float, typer.Option(help="Seconds for the headers of a request.")] = 10.0,
    body_seconds: Annotated[float, typer.Option(help="Seconds for the body of a request.")] = 120.0,
    read_seconds: Annotated[float, typer.Option(help="Seconds in which a client must have read on in a long answer.")] = 30.0,
    max_unread: Annotated[int, typer.Option(help="Bytes of answers that may wait for all clients.")] = 256 << 20,
    refusals_per_second: Annotated[
        float, typer.Option(help="Refused requests of a key, or of an address without one; who has more is slowed down.")
    ] = 50.0,
    proxy: Annotated[
        list[str] | None,
        typer.Option(help="Address of a proxy whose X-Forwarded-For and -Proto are believed; may be repeated."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Name under which clients may reach it, as behind a proxy; may be repeated.")
    ] = None,
    root_path: Annotated[str, typer.Option(help="Path at which a proxy serves it, as /relax; the proxy takes it away.")] = "",
    max_runs: Annotated[int, typer.Option(help="Training runs at once; more wait.")] = 1,
    max_rollouts: Annotated[int, typer.Option(help="Rollouts of one key that are not over; more are refused.")] = 64,
    max_engines: Annotated[int, typer.Option(help="Engines that one training run may have.")] = 4,
    trust_uploads: Annotated[
        bool, typer.Option(help="Run uploaded code without a sandbox: who may upload may do all that the service may.")
    ] = False,
    worker_memory: Annotated[int, typer.Option(help="Bytes of memory of the worker of a registered environment.")] = 2 << 30,
    worker_processes: Annotated[int, typer.Option(help="Processes of such a worker.")] = 32,
    worker_cpus: Annotated[float, typer.Option(help="Processors that such a worker may keep busy.")] = 1.0,
    worker_files: Annotated[int, typer.Option(help="Bytes of the files that such a worker may write.")] = 1 << 30,
    decoders: Annotated[
        int | None, typer.Option(help="Processes that decode media; default: as many as processors, 3 or 4.")
    ] = None,
    decoder_memory: Annotated[int, typer.Option(help="Bytes of memory that such a process may take for an item.")] = 1 << 30,
    decode_seconds: Annotated[float, typer.Option(help="Seconds to decode one item.")] = 60.0,
    decode_cpu_seconds: Annotated[int, typer.Option(help="Seconds of a processor to decode one item.")] = 20,
    decode_waiting: Annotated[int, typer.Option(help="Bytes of one key's media that may wait to be decoded.")] = 512 << 20,
    traces: Annotated[str, typer.Option(help="URL of a receiver of OpenTelemetry traces over HTTP.")] = "",
    log_format: Annotated[str, typer.Option(help="text, or json: one object a line.")] = "text",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error; info has a line for each request.")] = (
        "warning"
    ),
) -> None:
    """Run the rollout service: episodes and agents over HTTP."""
    from relax_server.api.door.limits import DoorLimits
    from relax_server.api.environments.limits import WorkerLimits
    from relax_server.api.media.limits import PROCESSES, DecoderLimits
    from relax_server.api.serve import serve as run
    from relax_server.api.settings import ServiceConfig
    from relax_server.engines.tokens import read_token

    door = DoorLimits(
        connections=max_connections,
        connections_per_address=max_connections_per_address,
        header_seconds=header_seconds,
        body_seconds=body_seconds,
        json_bytes=max_json,
        read_seconds=read_seconds,
        unread_bytes=max_unread,
        refusals_per_second=refusals_per_second,
    )
    each_worker = WorkerLimits(memory=worker_memory, processes=worker_processes, cpus=worker_cpus, files=worker_files)
    decoding = DecoderLimits(
        processes=PROCESSES if decoders is None else decoders,
        seconds=decode_seconds,
        cpu_seconds=decode_cpu_seconds,
        memory=decoder_memory,
        waiting=decode_waiting,
    )
    config = ServiceConfig(
        folder,
        model=model,
        engines=tuple(engine or ()),
        engine_token=read_token(engine_token_file) if engine_token_file is not None else "",
        media_paths=media_paths,
        host=host,
        port=port,
        no_keys=no_keys,
        journal=journal,
        name=name,
        threads=threads,
        workers=workers,
        drain_seconds=drain_seconds,
        keep_events_days=keep_events_days,
        concurrency=concurrency,
        idle_timeout=idle_timeout,
        max_body=max_body,
        max_log=max_log,
        door=door,
        proxies=tuple(proxy or ()),
        allowed_hosts=tuple(allowed_host or ()),
        root_path=root_path,
        max_runs=max_runs,
        traces=traces,
        max_rollouts=max_rollouts,
        max_engines=max_engines,
        worker_limits=each_worker,
        trust_uploads=trust_uploads,
        decoder_limits=decoding,
        log_format=log_format,  # type: ignore[arg-type]
        log_level=log_level,  # type: ignore[arg-type]
    )
    run(config)


@keys_app.command("add")
def add_key(
    name: str,
    rights: Annotated[str, typer.Option(help="Rights, with commas: run, upload, admin.")] = "run",
    episodes: Annotated[int, typer.Option(help="At once.")] = 1024,
    tokens_per_minute: Annotated[int, typer.Option(help="Generated ones.")] = 10_000_000,
    runs: Annotated[int, typer.Option(help="Training runs that are not over.")] = 16,
    media_bytes_per_day: Annotated[int, typer.Option(help="Bytes of media that were not stored yet.")] = 64 << 30,
    worker_seconds_per_hour: Annotated[
        int, typer.Option(help="Seconds of processors, of its environments' workers and of decoding its media.")
    ] = 10 * 3600,
    days: Annotated[float | None, typer.Option(help="Until it expires; default: never.")] = None,
    folder: Folder = FOLDER,
    journal: Annotated[str | None, typer.Option()] = None,
) -> None:
    """Make a key; it is shown once."""
    ring = _ring(folder, journal)
    lifetime = days * 86_400 if days is not None else None
    secret, key = ring.create(
        name,
        [right.strip() for right in rights.split(",")],
        episodes=episodes,
        tokens_per_minute=tokens_per_minute,
        lifetime=lifetime,
        runs=runs,
        media_bytes_per_day=media_bytes_per_day,
        worker_seconds_per_hour=worker_seconds_per_hour,
    )
    typer.echo(f"{key.id}  {name}  {', '.join(sorted(key.rights))}", err=True)
    typer.echo(secret)


@keys_app.command("list")
def list_keys(folder: Folder = FOLDER, journal: Annotated[str | None, typer.Option()] = None) -> None:
    """All keys."""
    for row in _ring(folder, journal).list():
        expired = row["expires_at"] is not None and row["expires_at"] < time.time()
        state = "revoked" if row["revoked_at"] else "expired" if expired else "works"
        limits = f"{row['episodes']} episodes, {row['tokens_per_minute']} tokens/min, {row['runs']} runs, "
        limits += f"{row['media_bytes_per_day']} bytes of media/day, {row['worker_seconds_per_hour']} worker seconds/h"
        typer.echo(f"{row['id']}  {row['name']}  {', '.join(row['rights'])}  {limits}  {state}")


@keys_app.command("revoke")
def revoke_key(id: str, folder: Folder = FOLDER, journal: Annotated[str | None, typer.Option()] = None) -> None:
    """End a key."""
    done = _ring(folder, journal).revoke(id)
    typer.echo(f"{id} is revoked" if done else f"there is no key {id} that works")
    raise typer.Exit(0 if done else 1)


def _ring(folder: Path, journal: str | None):
    from relax_sdk.errors import ConfigError
    from relax_server.api.keys import KeyRing
    from relax_server.api.private import private_folder, write_for_this_user_alone
    from relax_server.journal import open_journal
    from relax_server.journal.sql import SqlJournal

    write_for_this_user_alone()
    if journal is None:
        private_folder(folder)
    opened = open_journal(journal or folder / "journal.db")
    if not isinstance(opened, SqlJournal):
        raise ConfigError(f"{journal}: keys need an SQL journal")
    return KeyRing(opened)
