"""The Python environment that SGLang runs in: found, looked at, or built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relax_sdk.errors import ConfigError
from relax_server.engines.venv import Venv, ask, build

VERSION = "0.5.23"
VENV = Venv("SGLang", "sglang", VERSION)
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
SHIM = Path(__file__).with_name("cpu_shim")
INSIDE = Path(__file__).with_name("inside")

_LOOK = """
import importlib.metadata, importlib.util, json, sys
try:
    version = importlib.metadata.version("sglang")
except importlib.metadata.PackageNotFoundError:
    version = None
cuda = False
if importlib.util.find_spec("torch") is not None:
    import torch
    cuda = torch.cuda.is_available()
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(json.dumps({"version": version, "cuda": cuda, "missing": missing}))
"""

OMNI_NEEDS = ("av", "decord", "gymnasium", "httpx_sse", "pydantic", "soundfile", "soxr", "transformers", "websockets")
"""What the media decoding of `relax_sdk` imports, in SGLang's process too."""


@dataclass(frozen=True)
class SglangEnvironment:
    """A Python that has SGLang."""

    python: Path
    version: str
    cuda: bool
    """Whether its torch sees a CUDA device; without one the CPU shim is used."""
    missing: tuple[str, ...] = ()
    """Packages that models with media need and that it lacks."""


def find_python(python: str | Path | None = None) -> Path:
    """The interpreter of SGLang's environment: `Venv.find`.

    Raises:
        ConfigError: there is none; the message holds the command that builds it.
    """
    return VENV.find(python)


async def look(python: Path) -> SglangEnvironment:
    """The packages of an environment.

    Raises:
        ConfigError: no SGLang in it, or it does not run.
        EngineError: no answer in time.
    """
    found = await ask(python, _LOOK, *OMNI_NEEDS)
    if found["version"] is None:
        raise ConfigError(f"{python} has no SGLang; {VENV.build} installs it")
    return SglangEnvironment(python, found["version"], found["cuda"], tuple(found["missing"]))


def install(folder: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Build the environment; a few minutes and about 3 GB.

    Where torch would be a CPU build, SGLang comes without its CUDA packages.

    Returns:
        Its interpreter.

    Raises:
        EngineError: pip failed; the message holds the end of what it said.
    """
    get = ["install", "--progress-bar", "off"]
    if Path("/proc/driver/nvidia/version").exists():
        steps = [("SGLang and CUDA packages", [*get, f"sglang=={VERSION}"]), ("what media need", [*get, *media_requirements()])]
    else:
        bare = [f"sglang=={VERSION}", "torchvision==0.28.0", "triton==3.6.0"]
        steps = [
            ("torch", [*get, "torch==2.13.0"]),
            ("SGLang without CUDA packages", [*get, "--no-deps", *bare]),
            ("what it needs", [*get, "-r", str(REQUIREMENTS)]),
        ]
    return build(folder or VENV.installed(), steps, say)


def media_requirements() -> list[str]:
    """The lines of `requirements.txt` after its heading for media."""
    lines = REQUIREMENTS.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# media"))
    return [line for line in lines[start:] if line and not line.startswith("#")]
