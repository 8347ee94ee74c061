"""The timeline: every process's spans within a window, few enough to draw."""

import json
from pathlib import Path

import pytest
from relax_server.timeline import Timeline
from relax_server.viewer import timeline
from relax_server.viewer.timeline import MOST_LANES, MOST_SPANS, Window, timeline_page


def written(folder: Path, role: str, spans: list[tuple[str, float, float, int]]) -> None:
    lines = Timeline(folder / "timeline", role)
    for name, began, ended, lane in spans:
        lines.add(name, began, ended, lane)
    lines.close()


def test_lanes_of_overlapping_work_are_apart(tmp_path: Path) -> None:
    written(tmp_path, "rollout", [("group", 100.0, 103.0, 1), ("group", 101.0, 102.0, 2), ("weights", 104.0, 104.5, 0)])
    (file,) = (tmp_path / "timeline").iterdir()
    with file.open("a") as half:
        half.write('{"name": "killed whi')
    page = timeline_page(tmp_path, Window())
    assert (page["from"], page["to"], page["hidden"]) == (100.0, 104.5, 0)
    assert [(lane["name"], lane["spans"]) for lane in page["lanes"]] == [
        (file.stem, [(104.0, 0.5, "weights")]),
        (f"{file.stem}/1", [(100.0, 3.0, "group")]),
        (f"{file.stem}/2", [(101.0, 1.0, "group")]),
    ]
    part = timeline_page(tmp_path, Window(102.5, 103.5))
    assert [lane["spans"] for lane in part["lanes"]] == [[(100.0, 3.0, "group")]]
    assert (part["from"], part["to"]) == (102.5, 103.5)


def test_lanes_beyond_the_limit_are_counted(tmp_path: Path) -> None:
    written(tmp_path, "rollout", [("group", 0.0, 1.0, lane) for lane in range(MOST_LANES + 3)])
    page = timeline_page(tmp_path, Window())
    assert (len(page["lanes"]), page["hidden"]) == (MOST_LANES, 3)


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_many_spans_are_merged_and_none_is_lost(tmp_path: Path, names: tuple[str, ...]) -> None:
    n = 3 * MOST_SPANS
    written(tmp_path, "engine", [(names[i % len(names)], i, i + 0.5, 0) for i in range(n)])
    ((spans),) = [lane["spans"] for lane in timeline_page(tmp_path, Window())["lanes"]]
    assert len(spans) <= MOST_SPANS
    assert (spans[0][0], spans[-1][0] + spans[-1][1]) == (0.0, n - 0.5)
    assert sum(duration for _, duration, _ in spans) >= n / 2  # all that was busy is


def test_a_window_of_a_long_file_is_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(timeline, "MOST_BYTES", 200 << 10)
    written(tmp_path, "engine", [("x", i, i + 0.5, 0) for i in range(20_000)])
    for start in (0.0, 9_000.25, 19_990.0):
        (lane,) = timeline_page(tmp_path, Window(start, start + 5))["lanes"]
        assert [span[0] for span in lane["spans"]] == [i for i in range(20_000) if i <= start + 5 and i + 0.5 >= start]
    (last,) = timeline_page(tmp_path, Window())["lanes"]
    assert last["spans"][-1][0] == 19_999
    assert json.dumps(last)
