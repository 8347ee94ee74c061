"""The kinds of engines a run can be told to use, and the client of each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from relax_sdk.config import EngineKind
from relax_sdk.errors import EngineError
from relax_server.engines.http import HttpEngine
from relax_server.engines.process import EngineProcess, ServerProcess
from relax_server.engines.settings import EngineSettings
from relax_server.engines.sglang.client import SglangEngine
from relax_server.engines.sglang.process import SglangProcess
from relax_server.engines.vllm.client import VllmEngine
from relax_server.engines.vllm.process import VllmProcess
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
    kind: EngineKind,
    url: str,
    media_root: Path,
    model_path: Path,
    inline_media: bool = False,
    warn: Callable[[str], None] = logger.warning,
) -> HttpEngine:
    """A client of an engine that runs.

    Args:
        kind: what runs there.
        url: where.
        media_root: the media folder, which the engine can read.
        model_path: of the served model.
        inline_media: send the bytes of media, for an engine that may not read them.
        warn: takes what the user should know of the engine; default: the log.

    Raises:
        ConfigError: `model_path` is not a model folder.
    """
    if kind == "sglang":
        return SglangEngine(url, media_root, inline_media=inline_media, routed_shape=routed_shape(model_path), warn=warn)
    if kind == "vllm":
        return VllmEngine(url)
    return HttpEngine(url, media_root, inline_media=inline_media)


async def stated_kind(url: str) -> EngineKind | None:
    """What a server says that it is; None where it does not say.

    Raises:
        EngineError: it does not answer.
    """
    engine = HttpEngine(url)
    try:
        info = await engine.server_info()
    finally:
        await engine.close()
    for kind in PROCESSES:
        if info.get("engine") == kind:
            return kind
    return "sglang" if "tp_size" in info else None  # it tells its settings in place of its name


async def connect_running(url: str, inline_media: bool) -> HttpEngine:
    """A client of a server that somebody else started, whatever it is.

    Args:
        url: where.
        inline_media: send the bytes of media, as it cannot read our files.
    """
    try:
        kind = await stated_kind(url)
    except EngineError:  # its health is asked for next
        kind = "embedded"
    if kind == "embedded":
        return HttpEngine(url, inline_media=inline_media)
    return VllmEngine(url) if kind == "vllm" else SglangEngine(url, inline_media=inline_media)
