"""Importing what a user names: `"package.module:Class"`, `"file.py:Class"`, and modules of a folder."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from relax_sdk.errors import ConfigError, RegistryError, RelaxError, raised

_importing: ContextVar[str | None] = ContextVar("importing", default=None)
"""The script that is being imported for the environment in it."""


def import_object(path: str) -> Any:
    """Import what `"package.module:name"` or `"file.py:name"` stands for.

    A module that is nowhere on `sys.path` is looked for in the current folder too, which then stays on the path, at its end.

    Raises:
        RegistryError: it cannot be imported.
    """
    module, _, name = path.rpartition(":")
    target: Any = import_file(Path(module)) if module.endswith(".py") else _import_here(module, path)
    try:
        for attribute in name.split("."):
            target = getattr(target, attribute)
    except AttributeError as error:
        raise RegistryError(f"{path!r} cannot be imported ({error})") from error
    return target


def import_file(path: Path) -> ModuleType:
    """Import a script as a module, without what it keeps under `if __name__ == "__main__":`.

    Its classes travel to other processes by value. Its folder is put on `sys.path`, as when it is run.

    Raises:
        RegistryError: there is no such file, or running it fails.
        ConfigError: it trains when it is imported.
    """
    import cloudpickle

    path = path.resolve()
    name = f"relax_script_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise RegistryError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__relax_file__"] = True
    sys.modules[name] = module
    try:
        with import_from(str(path.parent)), _only_imported(str(path)):
            spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, RelaxError) or not isinstance(error, (Exception, SystemExit)):
            raise
        raise RegistryError(f"{path} cannot be imported: it {raised(error)}") from error
    cloudpickle.register_pickle_by_value(module)
    return module


def import_module_from(name: str, folder: str | None) -> ModuleType:
    """Import a module by name, from a folder if one is given.

    Raises:
        RegistryError: it cannot be imported.
    """
    try:
        with import_from(folder), _only_imported(name):
            return importlib.import_module(name)
    except RelaxError:
        raise
    except ImportError as error:
        raise RegistryError(f"module {name!r} cannot be imported ({error})") from error
    except Exception as error:
        raise RegistryError(f"module {name!r} cannot be imported: it {raised(error)}") from error


@contextmanager
def import_from(folder: str | None) -> Iterator[None]:
    """Look in a folder first while this lasts, and last from then on."""
    if folder is None:
        yield
        return
    there = folder in sys.path
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        if not there:
            sys.path.append(folder)


def refuse_while_importing(what: str) -> None:
    """Raise if a script is only being imported for the environment in it.

    Args:
        what: the thing that must not happen then.

    Raises:
        ConfigError: it is.
    """
    script = _importing.get()
    if script is not None:
        raise ConfigError(
            f"{script} calls {what} while it is only imported for its environment; "
            f"put what trains under `if __name__ == '__main__':`"
        )


def _import_here(module: str, path: str) -> ModuleType:
    top = module.partition(".")[0]
    try:
        found = bool(top) and importlib.util.find_spec(top) is not None
    except ValueError:  # a module without a specification, such as `__main__`
        found = True
    if not found:
        here = Path.cwd()
        if top and ((here / f"{top}.py").is_file() or (here / top).is_dir()):
            sys.path.append(str(here))
            importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except (ImportError, ValueError) as error:
        where = f"; looked in the current folder {os.getcwd()} too" if not found else ""
        raise RegistryError(f"{path!r} cannot be imported ({error}{where})") from error
    except RelaxError:
        raise
    except Exception as error:
        raise RegistryError(f"{path!r} cannot be imported: it {raised(error)}") from error


@contextmanager
def _only_imported(script: str) -> Iterator[None]:
    token = _importing.set(script)
    try:
        yield
    finally:
        _importing.reset(token)
