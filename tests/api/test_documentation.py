"""The programs in the README and in the service's page do what they say."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from service_process import Service

ROOT = Path(__file__).parents[2]
HOST = "127.0.0.1:8000"
PROGRAMS = [
    (page, number)
    for page in ("README.md", "docs/service.md", "docs/agents.md")
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))
    if HOST in code
]


@pytest.mark.parametrize(("page", "number"), PROGRAMS)
def test_a_program_runs_as_it_stands(service: Service, page: str, number: int) -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[number]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code.replace(HOST, service.url.removeprefix("http://")), page, "exec"), {})
    assert "completed" in said.getvalue() or "truncated" in said.getvalue() or "'done': 8" in said.getvalue()


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 4
