"""`Origin`: where a run's environment came from, noted in the run folder, and how it is loaded again from there."""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

from relax_sdk.client.upload import OURS, by_value
from relax_sdk.env import Env
from relax_sdk.errors import ConfigError, RegistryError, RelaxError, raised
from relax_sdk.examples import gives_examples
from relax_sdk.loading import import_file, import_from, import_module_from
from relax_sdk.registry import EnvSpec, get_spec, registered
from relax_sdk.rewards import reward_weights

NOTE = "environment.json"
"""The file of a run folder that holds its `Origin`."""
COPY = "environment.pkl"
"""The file with code and tasks as they were, where the environment's code belongs to no installed package."""
COPY_LIMIT = 64 * 2**20
"""Bytes of a copy; an environment with larger tasks is loaded from its files or not at all."""

AgentLike = Callable[..., Any] | str | Sequence[str] | None


@dataclass(frozen=True)
class Origin:
    """The place that an environment came from, and what played its episodes."""

    id: str
    """Its name in the run's settings."""
    name: str
    """The class's qualified name."""
    module: str
    """The module that registered it, or that holds the class; `__main__` for a script or a notebook."""
    file: str | None = None
    """The module's file; None for a notebook."""
    folder: str | None = None
    """Where Python found the module, to be put on `sys.path`; None for installed packages."""
    registered: bool = False
    """Importing the module registers the environment."""
    from_code: bool = True
    """Importing the module gives all of it; False where tasks or arguments were given beside the class."""
    python: str = ""
    """The version that made the copy, such as `3.11`."""
    no_copy: str | None = None
    """Why there is no copy; None where there is one."""
    examples: bool | None = None
    """Whether the environment defines `format_example`."""
    agent: list[str] | str | None = None
    """The command that plays the episodes."""
    agent_function: str | None = None
    """The function that plays the episodes; it is in the copy."""
    description: str | None = None
    """The first paragraph of the environment's docstring."""
    weights: dict[str, float] | None = None
    """Weights of its reward components by name; the sum of the steps' rewards, `env`, has weight 1."""


def keep_origin(spec: EnvSpec, agent: AgentLike, folder: Path) -> None:
    """Note in a run folder where its environment and its agent came from.

    Args:
        spec: the environment.
        agent: as in `Trainer`.
        folder: the run folder.

    Raises:
        RegistryError: the environment cannot be imported.
        OSError: the folder cannot be written.
    """
    cls = spec.load()
    module, file = _module(spec.registered_in or cls.__module__)
    installed = _installed(module)
    described = agent if agent is None or isinstance(agent, str) else None if callable(agent) else list(agent)
    origin = Origin(
        spec.id,
        cls.__qualname__,
        module,
        None if file is None else str(file),
        None if installed else str(Path.cwd() if file is None else _root(module, file)),
        spec.registered_in is not None,
        _importable(spec, cls),
        _python(),
        examples=gives_examples(cls),
        agent=described,
        agent_function=getattr(agent, "__qualname__", type(agent).__name__) if callable(agent) else None,
        description=_description(cls),
        weights=reward_weights(cls),
    )
    if module.partition(".")[0] in OURS and _importable(spec, cls) and not callable(agent):
        origin = replace(origin, no_copy="its code belongs to Relax Gym")
        (folder / COPY).unlink(missing_ok=True)
    else:
        origin = replace(origin, no_copy=_write_copy(spec, agent, folder / COPY))
    (folder / NOTE).write_text(json.dumps(asdict(origin), indent=1))


def _description(cls: type[Env]) -> str | None:
    first = (inspect.cleandoc(cls.__doc__) if cls.__doc__ else "").partition("\n\n")[0]
    return " ".join(first.split()) or None


def load_origin(folder: Path, id: str, env: str | type[Env] | EnvSpec | None = None) -> tuple[EnvSpec, AgentLike]:
    """Load the environment of a run, and what played its episodes, as its folder says.

    Code of a script, a notebook or a module that belongs to no installed package is run by this; a line on standard error
    says which.

    Args:
        folder: the run folder.
        id: the environment's name in the run's settings.
        env: the environment, in place of what the folder says. A class without tasks of its own gets those of the run.

    Returns:
        The environment under the name `id`; the agent, None for the built-in loops.

    Raises:
        RegistryError: it cannot be loaded; the message says why, and how to give it.
    """
    origin = read_origin(folder)
    if origin is not None and env is None and registered(id) is None:
        _check_owner(folder / NOTE)
    agent = _agent(folder, origin)
    if env is not None:
        given = get_spec(env)
        if isinstance(env, type) and given.load_tasks() is None and origin is not None:
            given = _with_tasks_of_run(given, folder, origin)
        return replace(given, id=id), agent
    spec = registered(id)
    if spec is None:
        if origin is None:
            try:
                spec = get_spec(id)
            except RegistryError as error:
                why = f"{folder} does not say where its environment came from"
                raise RegistryError(f"{why}, and {error}. {_how(id)}") from error
        else:
            spec = _load(folder, origin)
    return spec if spec.id == id else replace(spec, id=id), agent


def _with_tasks_of_run(given: EnvSpec, folder: Path, origin: Origin) -> EnvSpec:
    """The class with the tasks and the arguments that the run's own had; as it is where the run's own cannot be loaded."""
    try:
        own = registered(origin.id)
        if own is None:
            _check_owner(folder / NOTE)
            own = _load(folder, origin)
        return replace(given, tasks=own.load_tasks(), kwargs=given.kwargs or own.kwargs)
    except RegistryError:
        return given


def _load(folder: Path, origin: Origin) -> EnvSpec:
    """Load the environment from its module or file as it is now, else from the run's copy."""
    try:
        spec = _from_code(origin)
        source = origin.file if origin.folder is not None else None
    except RelaxError as error:
        why = str(error)
        if origin.no_copy is not None:
            raise RegistryError(
                f"the environment {origin.id!r} of {folder} cannot be loaded: {why}; "
                f"there is no copy either ({origin.no_copy}). {_how(origin.id)}"
            ) from error
        spec = _read_copy(folder, origin)["spec"]
        source = f"{folder / COPY}, as it was when the run began ({why})"
    if source is not None:
        print(f"environment {origin.id}: loaded from {source}", file=sys.stderr)
    return spec


def _from_code(origin: Origin) -> EnvSpec:
    if not origin.from_code:
        raise RegistryError("its tasks or arguments were given beside its class when the run began")
    if origin.module != "__main__":
        module = import_module_from(origin.module, origin.folder)
    elif origin.file is None:
        raise RegistryError("it was defined in a notebook or an interactive session")
    else:
        file = Path(origin.file)
        if not file.exists():
            raise RegistryError(f"{file} is gone")
        if not is_guarded(file):
            raise RegistryError(f"{file} has no `if __name__ == '__main__':`, so that importing it would run all of it")
        module = import_file(file)
    if origin.registered:
        spec = registered(origin.id)
        if spec is None:
            raise RegistryError(f"importing {origin.file or origin.module} does not register {origin.id!r}")
        return spec
    target: Any = module
    for part in origin.name.split("."):
        target = getattr(target, part, None)
    if target is None:
        raise RegistryError(f"there is no {origin.name} in {origin.file or origin.module}")
    spec = get_spec(target)
    spec.load()
    return spec


def _importable(spec: EnvSpec, cls: type[Env]) -> bool:
    """Whether importing a module gives the same specification again."""
    if spec.registered_in is not None:
        return registered(spec.id) is spec
    target: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        target = getattr(target, part, None)
    return target is cls and spec.tasks is getattr(cls, "tasks", None) and not spec.kwargs


def is_guarded(file: Path) -> bool:
    """Whether a script keeps what it does when it is run under `if __name__ == "__main__":`."""
    try:
        body = ast.parse(file.read_text()).body
    except (OSError, ValueError, SyntaxError):
        return False
    return any(isinstance(node, ast.If) and _is_main_test(node.test) for node in body)


def _is_main_test(test: ast.expr) -> bool:
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq)):
        return False
    sides = (test.left, test.comparators[0])
    names = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    return names and any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)


def _module(name: str) -> tuple[str, Path | None]:
    """The name that a module can be imported by, and its file."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if name == "__main__" and spec is not None and spec.name != "__main__":  # `python -m package.module`
        name = spec.name.removesuffix(".__main__") if spec.name.endswith(".__main__") else spec.name
    file = getattr(module, "__file__", None)
    if getattr(module, "__relax_file__", False):
        name = "__main__"  # a script that was imported by its path
    return name, None if file is None else Path(file).resolve()


def _root(module: str, file: Path) -> Path:
    """The folder in which Python finds a module's top-level package."""
    if module == "__main__":
        return file.parent
    return file.parents[module.count(".") + (file.name == "__init__.py")]


def _installed(module: str) -> bool:
    top = module.partition(".")[0]
    return top in OURS or top in sys.stdlib_module_names or top in packages_distributions()


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


class _Limited(io.BytesIO):
    """A buffer that refuses to become larger than a copy may be."""

    def write(self, data: Any) -> int:
        if self.tell() + len(memoryview(data)) > COPY_LIMIT:
            raise ConfigError(f"with its tasks it is larger than {COPY_LIMIT // 2**20} MiB")
        return super().write(data)


def _write_copy(spec: EnvSpec, agent: AgentLike, path: Path) -> str | None:
    """Keep code and tasks; the reason where they cannot be kept."""
    import cloudpickle

    try:
        cls, tasks = spec.load(), spec.load_tasks()
        sources = list(tasks.values()) if isinstance(tasks, Mapping) else [tasks]
        kept = {"spec": replace(spec, entry=cls, tasks=tasks), "agent": agent if callable(agent) else None}
        buffer = _Limited()
        with by_value(cls, *(thing for thing in (*sources, agent) if callable(thing))):
            cloudpickle.dump(kept, buffer)
    except Exception as error:
        path.unlink(missing_ok=True)
        return str(error) if isinstance(error, RelaxError) else f"pickling it {raised(error)}"
    path.write_bytes(buffer.getvalue())
    return None


def read_origin(folder: Path) -> Origin | None:
    """What a run folder says of its environment, without loading anything; None where it says nothing.

    Raises:
        RegistryError: the note cannot be read.
    """
    path = folder / NOTE
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, Mapping):
            raise ValueError("not an object")
        return Origin(**values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise RegistryError(f"{path} cannot be read ({error})") from error


def _check_owner(path: Path) -> None:
    """Code is run because a file of the run folder names it, so that file must be this user's own."""
    if path.stat().st_uid != os.getuid():
        raise RegistryError(
            f"{path} belongs to another user, so the code that it names is not run. If you trust it: "
            f"--env package.module:Class, or Run.load(folder, env=…)"
        )


def _read_copy(folder: Path, origin: Origin) -> dict[str, Any]:
    import cloudpickle

    path = folder / COPY
    if origin.python != _python():
        raise RegistryError(f"{path} was made by Python {origin.python} and this is {_python()}. {_how(origin.id)}")
    try:
        _check_owner(path)
        with import_from(origin.folder):
            kept = cloudpickle.loads(path.read_bytes())
    except RelaxError:
        raise
    except Exception as error:
        raise RegistryError(f"{path} cannot be loaded: it {raised(error)}. {_how(origin.id)}") from error
    if not (isinstance(kept, Mapping) and isinstance(kept.get("spec"), EnvSpec)):
        raise RegistryError(f"{path} holds no environment. {_how(origin.id)}")
    return dict(kept)


def _agent(folder: Path, origin: Origin | None) -> AgentLike:
    if origin is None:
        return None
    if origin.agent_function is None:
        return origin.agent
    if origin.no_copy is not None:
        raise RegistryError(
            f"the episodes of {folder} were played by the function {origin.agent_function}, of which there is no copy "
            f"({origin.no_copy}). Go on from your script: Trainer(…, agent={origin.agent_function}, folder=…)"
        )
    return _read_copy(folder, origin)["agent"]


def _how(id: str) -> str:
    return (
        f"Give it: `--env package.module:Class` or `--env file.py:Class` on the command line, Run.load(folder, env=…) "
        f"in Python, or register {id!r} first"
    )
