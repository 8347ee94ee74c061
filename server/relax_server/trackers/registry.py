"""The trackers by name: those that ship, those of installed packages, and those that a program adds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import entry_points

from relax_sdk.config import TrackingConfig
from relax_sdk.errors import ConfigError, RegistryError
from relax_sdk.loading import import_object
from relax_server.trackers.base import Tracker

GROUP = "relax.trackers"
"""Entry points of packages that bring trackers."""

Make = Callable[..., Tracker]

_made: dict[str, str | Make] = {
    name: f"relax_server.trackers.{name}:{cls}"
    for name, cls in (
        ("tensorboard", "TensorBoardTracker"),
        ("wandb", "WandbTracker"),
        ("mlflow", "MlflowTracker"),
        ("prometheus", "PrometheusTracker"),
    )
}


def register_tracker(name: str, make: Make) -> None:
    """Add a tracker for the runs that this program carries out itself.

    Runs on Ray are carried out elsewhere: name theirs `"package.module:Class"`, or bring it in a package with an entry point in
    the group `relax.trackers`.

    Args:
        name: for `tracking.trackers`.
        make: the class, or what makes one; gets `tracking.options[name]` as keywords.

    Raises:
        RegistryError: another tracker has the name.
    """
    if _made.setdefault(name, make) is not make:
        raise RegistryError(f"there is a tracker {name!r} already; choose another name")


def make_trackers(config: TrackingConfig) -> dict[str, Tracker]:
    """The trackers of a run, by their names.

    Raises:
        ConfigError: there is none of that name, it lacks a package, or its options are not those it takes.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    trackers: dict[str, Tracker] = {}
    for name in config.trackers:
        try:
            make = points[name].load() if name in points else _made.get(name, name)
            if isinstance(make, str) and ":" in make:
                make = import_object(make)
        except (ImportError, RegistryError) as error:
            raise ConfigError(f"tracker {name!r} cannot be imported: {error}") from error
        if isinstance(make, str):
            known = ", ".join(sorted({*_made, *points}))
            raise ConfigError(f"tracking.trackers: no tracker {name!r}; there are {known}, and 'package.module:Class'")
        trackers[name] = _with_options(name, make, config)
    return trackers


def _with_options(name: str, make: Make, config: TrackingConfig) -> Tracker:
    options = config.options.get(name, {})
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        allowed = ", ".join(inspect.signature(make).parameters) or "none"
        raise ConfigError(f"tracking.options[{name!r}]: {error}; allowed: {allowed}") from error
    return make(**options)
