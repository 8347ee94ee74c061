"""Python environments of other engines, beside ours: found, asked what they hold, or built."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import relax_sdk
from relax_sdk.errors import ConfigError, EngineError
from relax_server.models.catalog import cache_root

LOOK_SECONDS = 120.0
"""Seconds for importing torch in the environment, which reads much from a disk that may be slow."""


@dataclass(frozen=True)
class Venv:
    """The environment of one kind of engine."""

    name: str
    kind: str
    """The engine's kind, as in `relax engine KIND`."""
    version: str
    """What `--install` brings."""

    @property
    def variable(self) -> str:
        """Names an interpreter that has it."""
        return f"RELAX_{self.kind.upper()}_PYTHON"

    @property
    def folder(self) -> str:
        return f".venv-{self.kind}"

    @property
    def build(self) -> str:
        """The command that builds it."""
        return f"`relax engine {self.kind} --install`, or `make {self.folder}` in a checkout"

    def installed(self) -> Path:
        """The folder that `--install` puts it into."""
        return cache_root() / f"{self.kind}-{self.version}"

    def find(self, python: str | Path | None = None) -> Path:
        """Its interpreter.

        Looked for in this order: `python`, the variable, the folder in the working folder and in the checkout, and what
        `--install` built.

        Args:
            python: an interpreter, or the folder of a virtual environment.

        Raises:
            ConfigError: there is none; the message holds the command that builds it.
        """
        named = python or os.environ.get(self.variable)
        if named:
            path = Path(named)
            path = path / "bin" / "python" if path.is_dir() else path
            if not path.exists():
                where = "given" if python else f"from ${self.variable}"
                raise ConfigError(f"{self.name}: there is no interpreter at {path} ({where})")
            return path
        checkout = Path(relax_sdk.__file__).parent.parent
        for place in (Path.cwd() / self.folder, checkout / self.folder, self.installed()):
            if (place / "bin" / "python").exists():
                return place / "bin" / "python"
        raise ConfigError(
            f"{self.name} is not installed; {self.build} installs it. Or name an interpreter that has it in ${self.variable}"
        )


def clean_environment() -> dict[str, str]:
    """Ours without what would make another interpreter import our packages, or what lies in the working folder."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {key: value for key, value in os.environ.items() if key not in ours} | {"PYTHONSAFEPATH": "1"}


async def ask(python: Path, program: str, *arguments: str) -> Any:
    """What a program in another interpreter prints as JSON in its last line.

    Raises:
        ConfigError: it does not run.
        EngineError: no answer in time.
    """
    process = await asyncio.create_subprocess_exec(
        str(python), "-c", program, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean_environment()
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
    return json.loads(out.splitlines()[-1])


def build(folder: Path, steps: Sequence[tuple[str, Sequence[str]]], say: Callable[[str], None]) -> Path:
    """Make a virtual environment.

    Args:
        folder: where.
        steps: what each is called, and the arguments of pip.
        say: told the name of each step.

    Returns:
        Its interpreter.

    Raises:
        EngineError: pip failed; the message holds the end of what it said.
    """
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
    commands = [(f"creating {folder}", [sys.executable, "-m", "venv", str(folder)])]
    commands += [(name, [*pip, *arguments]) for name, arguments in steps]
    for name, command in commands:
        say(f"==> {name}")
        done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), timeout=3600)
        if done.returncode != 0:
            raise EngineError(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout)[-3000:]}")
    return python
