"""The table of docs/models.md: `python -m relax_server.models.families.page` writes it anew."""

from __future__ import annotations

import sys
from pathlib import Path

from relax_server.models.families import TABLE, Family
from relax_server.models.families.base import Served

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
PAGE = Path("docs/models.md")
COLUMNS = ("Architecture", "Models", "`model_type`", "Media", "Embedded engine", "SGLang", "vLLM", "Built-in random model")


def table() -> str:
    """Say in Markdown, one row an architecture, with which media and which engines it is trained."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(family) for family in TABLE.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(family: Family) -> tuple[str, ...]:
    types = [family.model_type] + ([family.whole.model_type] if family.whole is not None else [])
    media = ["text"] if family.media is None else ["text", *family.media.kinds]
    if family.media is not None and family.media.audio_in_video:
        media.append("audio in video")
    engines = ("tested", family.sglang, family.vllm)
    return (
        family.name,
        family.models,
        ", ".join(f"`{name}`" for name in types),
        ", ".join(media),
        *(_engine(served) for served in engines),
        f"`{family.tiny}`",
    )


def _engine(served: Served) -> str:
    return {"tested": "yes", "untested": "yes, not tested here", None: "refused"}[served]


def written(text: str) -> str:
    """A page with the table in its place.

    Args:
        text: of the page, with both marks.
    """
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    page.write_text(written(page.read_text()))
