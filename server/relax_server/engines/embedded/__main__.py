"""Start the embedded engine: `python -m relax_server.engines.embedded --model-path DIR`, its token in `RELAX_ENGINE_TOKEN`.

Exit codes: 0 after SIGTERM or SIGINT, or when the parent is gone; 2 wrong arguments, no token, or a model that cannot be
served; 3 the port is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path

KV_BYTES = 2**30
"""Memory of the KV pool where --max-total-tokens is not given, and at most this many tokens."""
KV_TOKENS = 131_072

STOPPING = (signal.SIGTERM, signal.SIGINT)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("relax_server.engines.embedded", description=__doc__)
    parser.add_argument(
        "--model-path", required=True, help="a save_pretrained folder, or a built-in name such as relax/tiny-omni"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--media-root", type=Path, help="the only folder media paths may point into")
    parser.add_argument("--threads", type=int, default=1, help="of the model; media have two of their own")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-total-tokens", type=int, help="KV slots; by default 1 GiB worth")
    parser.add_argument("--max-running", type=int, default=512, help="sequences in one batch")
    parser.add_argument("--chunked-prefill-size", type=int, default=2048, help="prompt tokens computed in one step")
    parser.add_argument("--return-routed-experts", action="store_true", help="record the experts of every token")
    parser.add_argument("--weight-version", default="0", help="of the weights in --model-path")
    parser.add_argument("--ready-file", help="where the URL is written once requests are answered")
    parser.add_argument("--features", type=Path, help="a folder in shared memory where media features are exchanged")
    parser.add_argument("--timeline", type=Path, help="a folder that gets this process's spans for a Chrome trace")
    parser.add_argument("--parent-pid", type=int, help="end when this process is gone")
    arguments = parser.parse_args()
    for name in ("threads", "max_running", "chunked_prefill_size"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(arguments, name)}")
    if arguments.media_root is not None and not arguments.media_root.is_dir():
        parser.error(f"--media-root {arguments.media_root} is not a folder")
    return arguments


def _listen(host: str, port: int) -> socket.socket:
    # With the protocol named, asyncio sets TCP_NODELAY; without, streamed tokens wait 40 ms for each other.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        sys.exit(_fail(3, f"port {port} on {host} cannot be used ({error.strerror}); pass another --port, or 0 for a free one"))
    return listener


def _fail(code: int, message: str) -> int:
    print(f"relax engine: {message}", file=sys.stderr, flush=True)
    return code


def _announce(url: str, ready_file: str | None) -> None:
    if ready_file and ready_file.startswith("/dev/"):
        Path(ready_file).write_text(url + "\n")
    elif ready_file:
        temporary = Path(f"{ready_file}.{os.getpid()}")
        temporary.write_text(url + "\n")
        temporary.replace(ready_file)
    print(f"relax engine ready at {url}", flush=True)


def _leave(*_: object) -> None:
    """Nothing is served yet, so there is nothing to end."""
    os._exit(0)


def _watch_parent(pid: int) -> None:
    """Have this process ended as by SIGTERM when that one is gone, also while the model is being loaded."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        _leave()
        return

    def wait() -> None:
        select.select([handle], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="parent", daemon=True).start()


async def _serve(arguments: argparse.Namespace, path: Path, listener: socket.socket, token: str) -> None:
    import torch
    from aiohttp import web

    from relax_server.engines.embedded.control import Control
    from relax_server.engines.embedded.kv_pool import KVPool
    from relax_server.engines.embedded.model import ModelRunner
    from relax_server.engines.embedded.prompts import PromptBuilder
    from relax_server.engines.embedded.scheduler import Scheduler, SchedulerConfig
    from relax_server.engines.embedded.server import EngineServer
    from relax_server.garbage import settle
    from relax_server.guard import Guard, hosts_of
    from relax_server.models.processor import Processor
    from relax_server.timeline import Timeline

    torch.set_num_threads(arguments.threads)
    processor = Processor.load(path, arguments.features)
    dtype = getattr(torch, arguments.dtype)
    runner = ModelRunner(path, processor.hf_config, dtype, arguments.return_routed_experts)
    each = KVPool.bytes_per_token(runner.layers, runner.kv_heads, runner.head_dim, dtype)
    config = SchedulerConfig(
        capacity=arguments.max_total_tokens or min(KV_TOKENS, KV_BYTES // each),
        max_running=arguments.max_running,
        chunk=arguments.chunked_prefill_size,
        eos_ids=processor.eos_ids,
        banned_ids=processor.banned_ids,
        record_routes=arguments.return_routed_experts,
        decode=lambda ids: processor.tokenizer.decode(ids, skip_special_tokens=False),
    )
    control = Control(Scheduler(runner, config, arguments.weight_version), Timeline(arguments.timeline, "engine"))
    guard = Guard(token, hosts_of(arguments.host), "the token that this engine was started with")
    server = EngineServer(control, PromptBuilder(processor, arguments.media_root), path, arguments.threads, guard)
    stop = asyncio.Event()
    for number in STOPPING:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    web_runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await web_runner.setup()
    await web.SockSite(web_runner, listener).start()
    settle()
    _announce(f"http://{arguments.host}:{listener.getsockname()[1]}", arguments.ready_file)
    await stop.wait()
    await server.close()
    await web_runner.cleanup()


def main() -> int:
    arguments = _arguments()
    for number in STOPPING:
        signal.signal(number, _leave)
    if arguments.parent_pid is not None:
        _watch_parent(arguments.parent_pid)
    os.environ.setdefault("OMP_NUM_THREADS", str(arguments.threads))  # read by torch when it is imported
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    listener = _listen(arguments.host, arguments.port)
    from relax_sdk.errors import RelaxError
    from relax_server.engines.tokens import take_token
    from relax_server.models.catalog import resolve_model

    try:
        token = take_token()
        path = resolve_model(arguments.model_path)  # before anything slow is imported
        asyncio.run(_serve(arguments, path, listener, token))
    except RelaxError as error:
        return _fail(2, str(error))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a model thread inside a forward must not delay the end
