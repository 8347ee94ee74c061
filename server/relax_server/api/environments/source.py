"""Where the code of a registered environment comes from."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, Literal

import msgspec

from relax_sdk.errors import ConfigError, RegistryError
from relax_sdk.registry import EnvSpec, get_spec


class EnvSource(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is started with."""

    id: str
    kind: Literal["import", "package", "upload"]
    entry: str = ""
    """`import`: `package.module:Class`. `package`: the name of an environment that it registers."""
    tasks: str | None = None
    """`import`: `package.module:function`."""
    package: str = ""
    """An installed distribution."""
    payload: bytes | None = None
    """`upload`: a spec, by cloudpickle."""
    python: str = ""
    """`upload`: version that pickled it, as `3.11`."""


def python_version() -> str:
    """Python's version in this process, as `3.11`: bytes of code do not travel between versions."""
    return ".".join(platform.python_version_tuple()[:2])


def load_spec(source: EnvSource) -> EnvSpec:
    """Import or unpickle it: to be called in a worker only.

    Raises:
        RegistryError, ConfigError: it cannot be found, or is not an environment.
    """
    import dataclasses

    match source.kind:
        case "import":
            spec = EnvSpec(source.id, source.entry, source.tasks)
        case "package":
            _load_package(source.package)
            spec = get_spec(source.entry or source.id)
        case "upload":
            spec = _unpickle(source)
    spec.load()
    return dataclasses.replace(spec, id=source.id)


def _load_package(name: str) -> None:
    try:
        points = [point for point in distribution(name).entry_points if point.group == "relax.envs"]
    except PackageNotFoundError as error:
        raise RegistryError(f"package {name!r} is not installed at the service") from error
    if not points:
        raise RegistryError(f"package {name!r} has no entry point in the group relax.envs")
    for point in points:
        try:
            point.load()
        except Exception as error:
            raise RegistryError(f"package {name!r} cannot be imported ({type(error).__name__}: {error})") from error


def _unpickle(source: EnvSource) -> EnvSpec:
    import cloudpickle

    try:
        spec: Any = cloudpickle.loads(source.payload or b"")
    except Exception as error:
        raise ConfigError(f"what was uploaded cannot be unpickled ({type(error).__name__}: {error})") from error
    if not isinstance(spec, EnvSpec):
        raise ConfigError(f"what was uploaded is a {type(spec).__name__}, not an EnvSpec; use Client.upload_env")
    return spec
