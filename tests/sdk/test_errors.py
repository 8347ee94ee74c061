"""The tree of errors that the docstring draws is the tree that there is."""

from __future__ import annotations

import importlib
import pkgutil
import re

import relax_sdk
from relax_sdk import errors


def drawn() -> dict[str, str]:
    """Each error in the docstring's tree, and what it derives from there."""
    parents, above = {}, ["RelaxError"]
    for line in re.findall(r"^[│├└─ ]+[A-Z]\w+", errors.__doc__ or "", re.MULTILINE):
        name = line.lstrip("│├└─ ")
        depth = (len(line) - len(name)) // 4
        parents[name] = above[depth - 1]
        above[depth:] = [name]
    return parents


def test_every_error_of_the_sdk_has_its_place_in_the_tree() -> None:
    for module in pkgutil.walk_packages(relax_sdk.__path__, "relax_sdk."):
        importlib.import_module(module.name)
    found, todo = {}, [errors.RelaxError]
    while todo:
        base = todo.pop()
        for kind in base.__subclasses__():
            if kind.__module__.startswith("relax_sdk.") and not kind.__name__.startswith("_"):
                assert kind.__module__ == "relax_sdk.errors", f"{kind.__name__} is defined in {kind.__module__}"
                found[kind.__name__] = base.__name__
                todo.append(kind)
    assert found == drawn()


def test_what_is_in_the_tree_is_exported() -> None:
    assert {"RelaxError", *drawn()} == set(errors.__all__)
