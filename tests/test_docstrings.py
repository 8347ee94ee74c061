"""A docstring is a sentence with a subject: it does not begin as the rest of somebody else's sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = ["relax_sdk", "relax_envs", "relax_agents", "relax_server", "benchmarks", "tests"]
REPOSITORY = Path(__file__).parents[1]
HEADLESS = re.compile(r"(Of\b|Whose\b|That of\b|Those of\b|As (in|for|of)\b.{0,40}$)")
"""`Of the run.` tells a reader nothing who sees it alone, as an editor shows it."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring of modules, classes, functions and fields, and of what commands give as `help`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield node.value.lineno, str(node.value.value)
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        owner = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for before, statement in zip([None, *body], body, strict=False):
            text = statement.value if isinstance(statement, ast.Expr) else None
            described = isinstance(before, (ast.Assign, ast.AnnAssign)) or (before is None and owner)
            if described and isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.lineno, text.value.strip()


def headless(source: str) -> list[tuple[int, str]]:
    """Docstrings without a subject."""
    return [(line, text.partition("\n")[0]) for line, text in docstrings(source) if HEADLESS.match(text)]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_have_a_subject(package: str) -> None:
    spec = find_spec(package) if package.startswith("relax_") else None
    root = Path(spec.origin).parent if spec is not None and spec.origin is not None else REPOSITORY / package
    assert root.is_dir()
    found = [
        f"{file.relative_to(root)}:{line}: {text}" for file in root.rglob("*.py") for line, text in headless(file.read_text())
    ]
    assert not found, "\n".join(found)


def test_the_check_sees_modules_methods_and_fields() -> None:
    source = (
        '"""Of the run."""\nclass A:\n    x: int = 0\n    """Whose it is."""\n    def f(self):\n        """Often right."""\n'
    )
    assert headless(source) == [(1, "Of the run."), (4, "Whose it is.")]


def test_the_check_sees_what_commands_give_as_help() -> None:
    assert headless('option(help="Of the service.")') == [(1, "Of the service.")]
    assert headless('option(help="URL of the service.")') == []
