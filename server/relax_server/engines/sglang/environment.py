"""The Python environment that SGLang runs in: found, looked at, or built."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import relax_sdk
from relax_sdk.errors import ConfigError, EngineError
from relax_server.models.catalog import cache_root

VERSION = "0.5.23"
VARIABLE = "RELAX_SGLANG_PYTHON"
FOLDER = ".venv-sglang"
BUILD = f"`relax engine sglang --install`, or `make {FOLDER}` in a checkout"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
SHIM = Path(__file__).with_name("cpu_shim")

LOOK_SECONDS = 120.0
"""For importing torch in the environment, which reads much from a disk that may be slow."""

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


def installed_folder() -> Path:
    """Where `install` puts the environment."""
    return cache_root() / f"sglang-{VERSION}"


def find_python(python: str | Path | None = None) -> Path:
    """The interpreter of SGLang's environment.

    Looked for in this order: `python`, `$RELAX_SGLANG_PYTHON`, `.venv-sglang` in the working folder and in the checkout, and
    what `install` built.

    Args:
        python: an interpreter, or the folder of a virtual environment.

    Raises:
        ConfigError: there is none; the message holds the command that builds it.
    """
    named = python or os.environ.get(VARIABLE)
    if named:
        path = Path(named)
        path = path / "bin" / "python" if path.is_dir() else path
        if not path.exists():
            raise ConfigError(f"SGLang: there is no interpreter at {path} ({'given' if python else f'from ${VARIABLE}'})")
        return path
    checkout = Path(relax_sdk.__file__).parent.parent
    places = [Path.cwd() / FOLDER, checkout / FOLDER, installed_folder()]
    for place in places:
        if (place / "bin" / "python").exists():
            return place / "bin" / "python"
    raise ConfigError(f"SGLang is not installed; {BUILD} installs it. Or name an interpreter that has it in ${VARIABLE}")


async def look(python: Path) -> SglangEnvironment:
    """What an environment holds.

    Raises:
        ConfigError: no SGLang in it, or it does not run.
        EngineError: no answer in time.
    """
    process = await asyncio.create_subprocess_exec(
        str(python), "-c", _LOOK, *OMNI_NEEDS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), LOOK_SECONDS)
    except TimeoutError:
        raise EngineError(f"{python} did not say within {LOOK_SECONDS:g} s what it holds") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ConfigError(f"{python} does not run: {err.decode(errors='replace')[-2000:]}")
    found = json.loads(out.splitlines()[-1])
    if found["version"] is None:
        raise ConfigError(f"{python} has no SGLang; {BUILD} installs it")
    return SglangEnvironment(python, found["version"], found["cuda"], tuple(found["missing"]))


def clean_environment() -> dict[str, str]:
    """Ours without what would make SGLang's interpreter import our packages, or what lies in the working folder."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key not in ours} | {"PYTHONSAFEPATH": "1"}


def install(folder: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Build the environment; a few minutes and about 3 GB.

    Where torch would be a CPU build, SGLang comes without its CUDA packages.

    Returns:
        Its interpreter.

    Raises:
        EngineError: pip failed; the message holds the end of what it said.
    """
    folder = folder or installed_folder()
    python = folder / "bin" / "python"
    gpu = Path("/proc/driver/nvidia/version").exists()
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "-q"]
    needs = ["-r", str(REQUIREMENTS)]
    steps = [(f"creating {folder}", [sys.executable, "-m", "venv", str(folder)])]
    if gpu:
        steps += [("SGLang and CUDA packages", [*pip, f"sglang=={VERSION}"])]
        steps += [("what media need", [*pip, *(line for line in media_requirements())])]
    else:
        steps += [("torch", [*pip, "torch==2.13.0"])]
        bare = [f"sglang=={VERSION}", "torchvision==0.28.0", "triton==3.6.0"]
        steps += [("SGLang without CUDA packages", [*pip, "--no-deps", *bare]), ("what it needs", [*pip, *needs])]
    for name, command in steps:
        say(f"==> {name}")
        done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=3600)
        if done.returncode != 0:
            raise EngineError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-3000:]}")
    return python


def media_requirements() -> list[str]:
    """The lines of `requirements.txt` after its heading for media."""
    lines = REQUIREMENTS.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("# media"))
    return [line for line in lines[start:] if line and not line.startswith("#")]
