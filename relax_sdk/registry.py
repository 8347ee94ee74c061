"""The registry of environments: `register()`, `"package.module:Class"` strings, and the entry-point group `relax.envs`."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any

import gymnasium
from gymnasium.envs.registration import WrapperSpec

from relax_sdk.env import Env
from relax_sdk.errors import ConfigError, RegistryError
from relax_sdk.loading import import_object
from relax_sdk.tasks import EVAL, Tasks, TaskSplit, task_splits

GYM_NAMESPACE = "relax"
"""What Gymnasium knows an environment by that has no namespace of its own."""
NAME = r"([\w-]+/)?[\w-]+"
"""What an environment may be called; as in Gymnasium, with at most one namespace."""


@dataclass(frozen=True)
class EnvSpec:
    """A registered environment."""

    id: str
    entry: type[Env] | str
    """The class, or `"package.module:Class"`."""
    tasks: Tasks | str = None
    """Rows by split, or `"package.module:function"` that returns them."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Given to the class."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Settings of `Trainer` that suit this environment, e.g. `{"sampling": {"max_new_tokens": 4}}`; the user's win.

    Those under the key `"from_scratch"` count only for models from random weights, such as `relax/tiny-omni`.
    """
    registered_in: str | None = field(default=None, compare=False)
    """The module that called `register`; None where nobody did."""

    def load(self) -> type[Env]:
        """The class.

        Raises:
            RegistryError: the string does not lead to an `Env` class.
        """
        cls = import_object(self.entry) if isinstance(self.entry, str) else self.entry
        if not (isinstance(cls, type) and issubclass(cls, Env)):
            raise RegistryError(f"{self.id}: {self.entry!r} is not a subclass of relax_sdk.Env")
        return cls

    def load_tasks(self) -> Tasks:
        """The tasks, imported if they were named by a string; without any, those that the class has as `tasks`."""
        tasks = self.tasks if self.tasks is not None else getattr(self.load(), "tasks", None)
        return import_object(tasks) if isinstance(tasks, str) else tasks

    def splits(self) -> dict[str, TaskSplit]:
        """The rows by split, freshly opened: `spec.splits()["train"].row(0)`."""
        return task_splits(self.load_tasks())

    def make(self) -> Env:
        """A new instance."""
        return self.load()(**self.kwargs)


_specs: dict[str, EnvSpec] = {}
_gym_ids: set[str] = set()
"""Names that this registry has given to Gymnasium."""
_discovered = False


def register(
    id: str,
    entry: type[Env] | str,
    *,
    tasks: Tasks | str = None,
    kwargs: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
) -> EnvSpec:
    """Make an environment known under a name; registering the same class again replaces it, as a notebook cell does.

    Args:
        id: its name, such as `chirp-v0`, or `acme/chirp-v0` with a namespace. It is then also
            `gymnasium.make("acme/chirp-v0")`; a name without a namespace is known to Gymnasium as `relax/chirp-v0`, which may
            be written here as well.
        entry: the class, or `"package.module:Class"`, which is imported when it is needed.
        tasks: rows, or a function that returns them, or a dictionary of either by split; default: the class's own `tasks`.
        kwargs: given to the class.
        defaults: settings of `Trainer` that suit this environment.

    Returns:
        The specification, as `get_spec(id)` gives it.

    Raises:
        RegistryError: the name is taken by another class or by an environment of Gymnasium's, or is not a name.
    """
    id = id.removeprefix(f"{GYM_NAMESPACE}/")
    if not re.fullmatch(NAME, id):
        raise RegistryError(
            "an environment's name must be one word of letters, digits, '-' and '_', which may have a namespace before it, "
            f"as in 'acme/chirp-v0'; got {id!r}"
        )
    old = _specs.get(id)
    if old is not None and _qualified(old.entry) != _qualified(entry):
        raise RegistryError(f"{id!r} is already registered as {_qualified(old.entry)}; choose another name")
    spec = EnvSpec(id, entry, tasks, kwargs or {}, defaults or {}, _caller())
    gym_id = id if "/" in id else f"{GYM_NAMESPACE}/{id}"
    if old is None and gym_id in gymnasium.registry and gym_id not in _gym_ids:
        raise RegistryError(f"{gym_id!r} is an environment of Gymnasium's already; choose another name")
    gymnasium.registry.pop(gym_id, None)
    try:
        gymnasium.register(
            gym_id,
            entry_point=lambda **kw: replace(spec, kwargs=spec.kwargs | kw).make(),
            disable_env_checker=True,  # its passive checker knows no coroutines; `SyncEnv` outside of it runs them
            additional_wrappers=(WrapperSpec("SyncEnv", "relax_sdk.sync_env:SyncEnv", {}),),
        )
    except gymnasium.error.Error as error:
        raise RegistryError(f"{id!r} cannot be an environment's name: {error}") from error
    _specs[id] = spec
    _gym_ids.add(gym_id)
    return spec


def get_spec(env: str | type[Env] | EnvSpec) -> EnvSpec:
    """Find an environment by registered name, import string, class or spec.

    `"package.module:Class"` and `"file.py:Class"` are imported, and looked for in the current folder too. A class that is
    registered comes with the tasks and settings it was registered with.

    Raises:
        RegistryError: unknown, in which case the message lists what there is; or it cannot be imported.
    """
    if isinstance(env, EnvSpec):
        return env
    if isinstance(env, type):
        return _registered_class(env) or EnvSpec(env.__name__, env, getattr(env, "tasks", None))
    if ":" in env:
        spec = EnvSpec(env, env)
        return _registered_class(spec.load()) or spec
    found = registered(env)
    if found is not None:
        return found
    raise RegistryError(
        f"unknown environment {env!r}; registered: {', '.join(sorted(_specs)) or 'none'}; or name it 'package.module:Class'"
    )


def registered(id: str) -> EnvSpec | None:
    """The environment that is registered under a name, in this program or by an installed package; None if there is none."""
    id = id.removeprefix(f"{GYM_NAMESPACE}/")
    if id not in _specs:
        discover()
    return _specs.get(id)


def _registered_class(cls: type[Env]) -> EnvSpec | None:
    return next((spec for spec in _specs.values() if spec.entry is cls), None)


def _caller() -> str | None:
    """The module that called into the SDK."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "relax_sdk":
        frame = frame.f_back
    return frame.f_globals.get("__name__") if frame is not None else None


def require_split(spec: EnvSpec, split: str) -> None:
    """Raise where an environment has no such split of tasks.

    Raises:
        ConfigError: the message lists the splits there are.
    """
    splits = spec.splits()
    if split not in splits:
        advice = "; register it with tasks={'train': …, 'eval': …}" if split == EVAL else ""
        raise ConfigError(f"{spec.id} has no {split!r} split; there are {', '.join(splits)}{advice}")


def list_envs() -> list[EnvSpec]:
    """All registered environments, those of installed packages included, by name."""
    discover()
    return [_specs[name] for name in sorted(_specs)]


def discover() -> None:
    """Import the modules behind the entry-point group `relax.envs`; each registers its environments when imported.

    A package that cannot be imported is warned of and left out, so that the others stay usable.
    """
    global _discovered
    if _discovered:
        return
    _discovered = True
    for point in entry_points(group="relax.envs"):
        try:
            point.load()
        except Exception as error:
            package = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            message = f"the environments of {package} cannot be imported ({type(error).__name__}: {error}) and are left out"
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _qualified(entry: type[Env] | str) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
