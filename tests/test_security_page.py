"""What the page on security says is shown by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "security.md"


def test_every_test_on_the_page_exists() -> None:
    missing, file, n = [], "", 0
    for name in re.findall(r"`((?:\w+/)?(?:\w+\.py)?::\w+)`", PAGE.read_text()):
        path, _, test = name.partition("::")
        file = path or file  # a name alone is in the file that was named before it
        found = [TESTS / file, TESTS / "api" / file]
        source = next((path.read_text() for path in found if path.is_file()), "")
        n += 1
        if f"def {test}(" not in source:
            missing.append(f"{file}::{test}")
    assert n > 50 and not missing, missing


def test_every_row_of_the_attackers_table_on_the_page_exists() -> None:
    page = PAGE.read_text().partition("| what is tried | what happens | rows |")[2].partition("\n\n")[0]
    rows = [row.rpartition("|")[0].rpartition("|")[2].strip() for row in page.splitlines()[2:]]
    titles = [title for row in rows if "::" not in row for title in row.split(", ")]
    attacks = (TESTS / "api" / "test_sandbox.py").read_text()
    assert len(titles) > 25 and not [title for title in titles if f'"{title}"' not in attacks]
