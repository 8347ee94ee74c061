"""`relax engine`: an engine of its own, started, watched and started again when it is lost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from relax_server.engines.run_cli import add_commands
from relax_server.engines.settings import EngineSettings
from relax_server.guard import new_token

if TYPE_CHECKING:
    from relax_server.engines.process import ServerProcess
    from relax_server.engines.sglang.process import SglangProcess
    from relax_server.engines.vllm.process import VllmProcess

app = typer.Typer(no_args_is_help=True, help="Engines that run on their own, and those of a training run.")
add_commands(app)

Model = Annotated[str, typer.Option(help="A built-in name or a Hugging Face folder.")]
Host = Annotated[str, typer.Option(help="Address to listen on; other machines reach it at another one than this.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="File with the token that callers have to show; default: $RELAX_ENGINE_TOKEN, or a new one.")
]
Port = Annotated[int, typer.Option(help="0 picks a free one.")]
MediaRoot = Annotated[Path | None, typer.Option(help="The only folder that media paths may point into; default: none may.")]
DType = Annotated[str, typer.Option(help="float32 or bfloat16.")]
Threads = Annotated[int, typer.Option(help="Threads of the model, on a CPU.")]
Tokens = Annotated[int | None, typer.Option(help="Tokens that the KV cache holds.")]
Routes = Annotated[bool, typer.Option(help="Record the experts of every token.")]
Log = Annotated[Path, typer.Option(help="File that its output goes to.")]
Restarts = Annotated[int, typer.Option(help="Ends in a row, each within ten minutes, after which it is given up.")]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def sglang(
    context: typer.Context,
    model: Model = "relax/tiny-omni",
    host: Host = "127.0.0.1",
    port: Port = 30000,
    token_file: TokenFile = None,
    python: Annotated[
        Path | None, typer.Option("--python", "--venv", help="SGLang's environment: its interpreter or its folder.")
    ] = None,
    media_root: MediaRoot = None,
    dtype: DType = "float32",
    threads: Threads = 1,
    max_total_tokens: Tokens = None,
    routed_experts: Routes = False,
    log: Log = Path("runs/engines/sglang.log"),
    restarts: Restarts = 5,
    install: Annotated[bool, typer.Option("--install", help="Build SGLang's environment, and do no more.")] = False,
) -> None:
    """Run a real SGLang server; options that are not named here go to SGLang as they are, such as --tp 2."""
    from relax_server.engines.sglang.environment import install as build
    from relax_server.engines.sglang.process import SglangProcess

    if install:
        return typer.echo(f"SGLang can be used: {build(python, typer.echo)}")
    settings = EngineSettings(
        python=python,
        media_root=media_root,
        dtype=dtype,
        threads=threads,
        host=host,
        port=port,
        token=_token(token_file),
        max_total_tokens=max_total_tokens,
        return_routed_experts=routed_experts,
        flags=tuple(context.args),
    )
    _keep_installed(SglangProcess, "sglang", model, log, settings, restarts)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def vllm(
    context: typer.Context,
    model: Model = "relax/tiny-qwen3",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_file: TokenFile = None,
    python: Annotated[
        Path | None, typer.Option("--python", "--venv", help="vLLM's environment: its interpreter or its folder.")
    ] = None,
    dtype: DType = "float32",
    threads: Threads = 1,
    max_total_tokens: Tokens = None,
    log: Log = Path("runs/engines/vllm.log"),
    restarts: Restarts = 5,
    install: Annotated[bool, typer.Option("--install", help="Build vLLM's environment, and do no more.")] = False,
) -> None:
    """Run a real vLLM server for a text model; options that are not named here go to vLLM as they are."""
    from relax_server.engines.vllm.environment import install as build
    from relax_server.engines.vllm.process import VllmProcess

    if install:
        return typer.echo(f"vLLM can be used: {build(python, typer.echo)}")
    settings = EngineSettings(
        python=python,
        dtype=dtype,
        threads=threads,
        host=host,
        port=port,
        token=_token(token_file),
        max_total_tokens=max_total_tokens,
        flags=tuple(context.args),
    )
    _keep_installed(VllmProcess, "vllm", model, log, settings, restarts)


@app.command()
def embedded(
    model: Model = "relax/tiny-omni",
    host: Host = "127.0.0.1",
    port: Port = 30000,
    token_file: TokenFile = None,
    media_root: MediaRoot = None,
    dtype: DType = "float32",
    threads: Threads = 1,
    max_total_tokens: Tokens = None,
    routed_experts: Routes = False,
    log: Log = Path("runs/engines/embedded.log"),
    restarts: Restarts = 5,
) -> None:
    """Run the embedded engine."""
    from relax_server.engines.process import EngineProcess

    process = EngineProcess(
        model,
        log,
        EngineSettings(
            media_root=media_root,
            dtype=dtype,
            threads=threads,
            host=host,
            port=port,
            token=_token(token_file),
            max_total_tokens=max_total_tokens,
            return_routed_experts=routed_experts,
        ),
    )
    _keep(process, f"embedded: {model}", 180.0, restarts)


def _token(file: Path | None) -> str:
    from relax_server.engines.tokens import read_token

    return read_token(file) or new_token()


def _keep_installed(
    process: type[SglangProcess] | type[VllmProcess], name: str, model: str, log: Path, settings: EngineSettings, restarts: int
) -> None:
    """Run a server of an environment of its own, which says how far it is with starting."""
    started = process(model, log, settings, progress=lambda what: typer.echo(f"{name}: {what}"))
    _keep(started, f"{name}: {model}", 600.0, restarts)


def _keep(process: ServerProcess, name: str, start_seconds: float, restarts: int) -> None:
    import asyncio

    from relax_server.engines.supervision import supervise

    asyncio.run(supervise(process, name, start_seconds, restarts, typer.echo))
