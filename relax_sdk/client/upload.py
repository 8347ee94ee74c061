"""An environment's code on its way to a service."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from typing import Any

from relax_sdk.env import Env
from relax_sdk.errors import ConfigError
from relax_sdk.registry import EnvSpec, get_spec

OURS = {"relax_sdk", "relax_server", "relax_envs", "relax_agents"}


def uploadable(env: str | type[Env] | EnvSpec, id: str | None) -> dict[str, Any]:
    """The body of `POST /v1/envs` for an environment, its code by value.

    Classes of scripts, notebooks and modules that no installed package holds travel whole; what they import from installed
    packages must be installed at the service.

    Raises:
        ConfigError: it cannot be pickled.
        RegistryError: unknown.
    """
    import cloudpickle

    spec = get_spec(env)
    spec = dataclasses.replace(spec, id=id or spec.id, entry=spec.load(), tasks=spec.load_tasks())
    try:
        with by_value(spec.load()):
            data = cloudpickle.dumps(spec)
    except Exception as error:
        raise ConfigError(
            f"{spec.id} cannot be sent ({type(error).__name__}: {error}); a generator of tasks is given as a function that "
            f"returns one, and what holds open files or sockets is made in reset"
        ) from error
    version = ".".join(platform.python_version_tuple()[:2])
    return {"id": spec.id, "upload": base64.b64encode(data).decode(), "python": version}


@contextlib.contextmanager
def by_value(*things: Any) -> Iterator[None]:
    """Pickle the modules of classes, of their bases, and of functions by value, if no installed package holds them."""
    import cloudpickle

    installed = set(packages_distributions()) | set(sys.stdlib_module_names) | OURS  # an editable install is not listed
    defined = [base for thing in things for base in getattr(thing, "__mro__", (thing,))]
    modules = {name for base in defined if isinstance(name := getattr(base, "__module__", None), str)}
    local = [sys.modules[m] for m in modules if m != "__main__" and m.partition(".")[0] not in installed and m in sys.modules]
    for module in local:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in local:
            cloudpickle.unregister_pickle_by_value(module)
