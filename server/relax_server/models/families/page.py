"""The tables of docs/models.md and docs/layouts.md: `python -m relax_server.models.families.page` writes them anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from relax_sdk.errors import ConfigError
from relax_sdk.layout import LayoutConfig
from relax_server.models.catalog import resolve_model
from relax_server.models.division import check_layout
from relax_server.models.families import TABLE, Family
from relax_server.models.families.base import Served

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
COLUMNS = ("Architecture", "Models", "`model_type`", "Media", "Embedded engine", "SGLang", "vLLM", "Built-in random model")


LAYOUTS = {
    "`tp=2`, `sp=False`": LayoutConfig(tp=2, sp=False),
    "`tp=2`": LayoutConfig(tp=2),
    "`pp=2`": LayoutConfig(pp=2),
    "`cp=2`": LayoutConfig(cp=2),
    "`dp=2`": LayoutConfig(dp=2),
    "`dp=2`, `ep=2`": LayoutConfig(dp=2, ep=2),
    "`tp=2`, `dp=2`": LayoutConfig(tp=2, dp=2),
    "`tp=2`, `pp=2`": LayoutConfig(tp=2, pp=2),
    "`dp=4`, `ep=2`": LayoutConfig(dp=4, ep=2),
}
"""Layouts that every architecture's built-in model is either trained in by the tests, or refused in."""


def refusal(family: Family, layout: LayoutConfig) -> str | None:
    """Why an architecture's built-in model is refused in a layout; None: it is trained there."""
    config = family.config_class().from_pretrained(resolve_model(family.tiny))
    try:
        check_layout(family.text(config), layout)
    except ConfigError as error:
        return str(error)
    return None


def layouts_table() -> str:
    """Say in Markdown which architecture is trained in which layout, and below it why the others are refused."""
    rows = [("Architecture", *LAYOUTS), ("---",) * (len(LAYOUTS) + 1)]
    reasons: list[str] = []
    for family in TABLE.values():
        found = [refusal(family, layout) for layout in LAYOUTS.values()]
        reasons = [*dict.fromkeys([*reasons, *(reason for reason in found if reason is not None)])]
        marks = ["yes" if reason is None else f"refused ({reasons.index(reason) + 1})" for reason in found]
        rows.append((family.name, *marks))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return table + "\n\n" + "\n".join(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))


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


PAGES = {Path("docs/models.md"): table, Path("docs/layouts.md"): layouts_table}


def written(text: str, made: Callable[[], str] = table) -> str:
    """A page with a table in its place.

    Args:
        text: of the page, with both marks.
        made: the table.
    """
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{made()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    for page, made in PAGES.items():
        page.write_text(written(page.read_text(), made))
