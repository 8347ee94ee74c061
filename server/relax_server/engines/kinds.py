"""The kinds of engines a run can be told to use, and the client of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from relax_sdk.config import EngineKind
from relax_sdk.errors import EngineDenied, EngineError
from relax_server.engines.addresses import EngineAddress
from relax_server.engines.http import CONTROL_TIMEOUT, HttpEngine
from relax_server.engines.process import EngineProcess, ServerProcess
from relax_server.engines.settings import EngineSettings
from relax_server.engines.sglang.client import SglangEngine
from relax_server.engines.sglang.process import SglangProcess
from relax_server.engines.tokens import find_token
from relax_server.engines.vllm.client import VllmEngine
from relax_server.engines.vllm.process import VllmProcess
from relax_server.loading_time import seconds_to_load
from relax_server.models.layout import routed_shape

logger = logging.getLogger(__name__)

PROCESSES: dict[EngineKind, type[ServerProcess]] = {
    "embedded": EngineProcess,
    "sglang": SglangProcess,
    "vllm": VllmProcess,
}


def process_of(
    kind: EngineKind,
    model_path: Path,
    log_path: Path,
    settings: EngineSettings,
    progress: Callable[[str], None] = lambda what: None,
) -> ServerProcess:
    """The process of an engine, not started yet.

    Args:
        kind: what is to run there.
        model_path: of the model to serve.
        log_path: where its output goes.
        settings: how it is started.
        progress: told what it is doing while it starts.
    """
    return PROCESSES[kind](model_path, log_path, settings, progress)


def connect(
    address: EngineAddress, media_root: Path, model_path: Path, warn: Callable[[str], None] = logger.warning
) -> HttpEngine:
    """A client of an engine that runs.

    Args:
        address: of the engine.
        media_root: the media folder, which the engine can read unless it is an external one.
        model_path: of the served model.
        warn: takes what the user should know of the engine; default: the log.

    Raises:
        ConfigError: `model_path` is not a model folder.
    """
    url, token, inline = address.url, address.token, address.external
    limit = seconds_to_load(CONTROL_TIMEOUT, model_path)  # an update of the weights reads as many bytes
    if address.kind == "sglang":
        shape = routed_shape(model_path)
        return SglangEngine(
            url, media_root, token=token, inline_media=inline, routed_shape=shape, control_timeout=limit, warn=warn
        )
    if address.kind == "vllm":
        return VllmEngine(url, token=token, control_timeout=limit)
    return HttpEngine(url, media_root, token=token, inline_media=inline, control_timeout=limit)


async def stated_kind(url: str, token: str) -> EngineKind | None:
    """What a server says that it is; None where it does not say.

    Raises:
        EngineDenied: it wants another token.
        EngineError: it does not answer.
    """
    engine = HttpEngine(url, token=token)
    try:
        info = await engine.server_info()
    finally:
        await engine.close()
    for kind in PROCESSES:
        if info.get("engine") == kind:
            return kind
    return "sglang" if "tp_size" in info else None  # it tells its settings in place of its name


async def connect_running(url: str, token: str, inline_media: bool) -> HttpEngine:
    """A client of a server that somebody else started, whatever it is.

    Args:
        url: where.
        token: to show it; empty: the one that `find_token` finds.
        inline_media: send the bytes of media, as it cannot read our files.

    Raises:
        EngineDenied: it wants another token.
        ConfigError: `RELAX_ENGINE_TOKEN` holds none.
    """
    token = token or await asyncio.to_thread(find_token, url)
    try:
        kind = await stated_kind(url, token)
    except EngineDenied:
        raise
    except EngineError:  # its health is asked for next
        kind = "embedded"
    if kind == "vllm":
        return VllmEngine(url, token=token)
    return (SglangEngine if kind == "sglang" else HttpEngine)(url, token=token, inline_media=inline_media)
