"""A run whose journal is a PostgreSQL database is shown as one with a journal in its folder is."""

import contextlib
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from postgres_server import PostgresServer, postgres
from relax_server.journal import open_journal
from relax_server.viewer.folders import FolderSource
from relax_server.viewer.journals import Journals
from relax_server.viewer.serve import make_app
from viewed_runs import make_run

from relax_sdk.errors import JournalError

__all__ = ["postgres"]

RUN = "runs/tone"
PAGES = (
    *(f"{RUN}/{page}" for page in ("trajectories.json", "trajectories.json?step=1", "trajectories.json?after=3&limit=2")),
    *(f"{RUN}/search.json?q={text}" for text in ("TASK%202", "100%25", "left%20%C3%A9")),
    *(f"{RUN}/trajectories/{seq}.json" for seq in (1, 4, 5, 13)),
    *(f"{RUN}/{page}" for page in ("groups/6.json", "media.json")),
)
"""Pages that are read from the journal."""
ELSEWHERE = ("folder", "replay", "journal", "created", "committed", "committed_at", "created_at")
"""What two runs differ in: their places, and when they were made."""


async def shown(folder: Path, journals: Journals) -> dict[str, Any]:
    """All pages of a run."""
    app = make_app(FolderSource([folder], journals), static=Path("/nowhere"))
    found = {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8100") as http:
        for page in ("runs.json", f"{RUN}/run.json", *PAGES):
            answer = await http.get(f"/view/data/{page}")
            assert answer.status_code == 200, f"{page}: {answer.text}"
            found[page] = orjson.loads(answer.content)
    return found


async def test_every_page_is_the_one_of_a_journal_in_the_folder(postgres: PostgresServer, tmp_path: Path) -> None:
    url, journals = postgres.make(), Journals()
    there = make_run(tmp_path / "there", url=url)
    assert not (there / "journal.db").exists()
    try:
        here, found = await shown(make_run(tmp_path / "here"), journals), await shown(there, journals)
    finally:
        journals.close()
    for page in PAGES:
        assert without_places(found[page]) == without_places(here[page]), page
    assert found["runs.json"]["runs"][0]["trajectories"] == 13
    with contextlib.closing(open_journal(url, read_only=True)) as journal, pytest.raises(JournalError, match="read-only"):
        journal.put_state("tone", "x", 1)


async def test_a_database_that_is_away_leaves_what_the_folder_has(postgres: PostgresServer, tmp_path: Path) -> None:
    folder, journals = make_run(tmp_path, url=postgres.make()), Journals()
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace("/test_", "/none_"))
    app = make_app(FolderSource([folder], journals), static=Path("/nowhere"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8100") as http:
        (row,) = (await http.get("/view/data/runs.json")).json()["runs"]
        assert (row["step"], row["trajectories"]) == (2, None)
        assert (await http.get(f"/view/data/{RUN}/metrics.json")).status_code == 200
        answer = await http.get(f"/view/data/{RUN}/trajectories.json")
        assert answer.status_code == 503 and "cannot be reached: start the database, or check its URL" in answer.text
    journals.close()


def without_places(value: Any) -> Any:
    """A page without what two runs differ in."""
    if isinstance(value, dict):
        return {name: without_places(inner) for name, inner in value.items() if name not in ELSEWHERE}
    return [without_places(inner) for inner in value] if isinstance(value, list) else value
