"""Files import one another one way: no file leads back to itself, not even by imports inside functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = ["relax_sdk", "relax_envs", "relax_agents", "relax_server"]


def modules(package: str) -> dict[str, Path]:
    """The package's modules by name."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    found = {}
    for file in root.rglob("*.py"):
        parts = (package, *file.relative_to(root).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(source: str, known: Mapping[str, Path]) -> Iterator[str]:
    """Names of the known modules that a source text imports anywhere, for type checkers only included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from [inner] if inner in known else [node.module] if node.module in known else []


def circle(files: Mapping[str, str]) -> list[str] | None:
    """Modules of one circle among sources by module name; None if there is none."""
    known = {name: Path() for name in files}
    graph = {name: set(imported(source, known)) - {name} for name, source in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_between_files(package: str) -> None:
    assert circle({name: file.read_text() for name, file in modules(package).items()}) is None


def test_an_import_inside_a_function_closes_a_circle() -> None:
    files = {"p.a": "import p.b", "p.b": "def f():\n    from p import c", "p.c": "from p.a import x"}
    found = circle(files)
    assert found is not None and set(found) == {"p.a", "p.b", "p.c"}
