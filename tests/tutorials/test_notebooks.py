"""The tutorials run from top to bottom, in a kernel whose event loop is running, and show what they promise."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2] / "tutorials"
NOTEBOOKS = sorted(ROOT.glob("*.ipynb"))
LONG = {"02_hear_see_watch", "03_tools_and_looking"}
"""They train, and play many episodes again: minutes."""
PLAYERS = {"02_hear_see_watch": "<video", "03_tools_and_looking": "<img"}
"""What is shown beside sounds."""


def outputs(notebook: nbformat.NotebookNode) -> list[dict]:
    return [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]


def mime_types(notebook: nbformat.NotebookNode) -> set[str]:
    return {mime for out in outputs(notebook) for mime in out.get("data", {})}


def html(notebook: nbformat.NotebookNode) -> str:
    return "".join(out["data"].get("text/html", "") for out in outputs(notebook) if "data" in out)


def test_there_are_three():
    assert [path.stem for path in NOTEBOOKS] == ["01_first_environment", "02_hear_see_watch", "03_tools_and_looking"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_were_executed(path):
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run it from top to bottom and save it"
    assert not [out for out in outputs(notebook) if out.output_type == "error"]
    assert "image/png" in mime_types(notebook) and "<audio" in html(notebook)
    printed = "".join(out.text for out in outputs(notebook) if out.output_type == "stream")
    assert "done: runs/" in printed and "done: /" not in printed
    assert len(set(re.findall(r"said '(\w)'", printed))) != 1, "show answers of which not all are the same letter"
    if path.stem == "03_tools_and_looking":
        assert_what_is_looked_at(notebook)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.nightly] if path.stem in LONG else []) for path in NOTEBOOKS],
)
def test_notebooks_execute(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "image/png" in mime_types(notebook) and "<audio" in html(notebook)
    assert PLAYERS.get(path.stem, "<audio") in html(notebook)
    if path.stem == "03_tools_and_looking":
        assert_what_is_looked_at(notebook)


def assert_what_is_looked_at(notebook: nbformat.NotebookNode) -> None:
    """The tools are called over several turns, a group is shown whole, and each kind of media gets its verdict."""
    printed = "".join(out.text for out in outputs(notebook) if out.output_type == "stream")
    assert "turn(key=" in html(notebook) and html(notebook).count("member 7 of 8") >= 1
    assert "answer of turn 1: trained in step" in printed
    assert "- **image**" in printed and "- **audio**" in printed and "episodes scored again" in printed
