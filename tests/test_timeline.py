"""Spans of several processes in one Chrome trace."""

import json
import os

from relax_server.timeline import Bursts, Timeline, write_trace

from relax_sdk.spans import read_spans


def test_spans_of_all_processes_are_in_one_trace_that_begins_at_zero(tmp_path):
    timeline = Timeline(tmp_path / "timeline", "policy")
    timeline.add("wait", 100.0, 100.5, step=1)
    timeline.add("train", 100.5, 102.0, step=1)
    timeline.close()
    (tmp_path / "timeline" / "engine-77.jsonl").write_text('{"name": "generate", "ph": "X", "ts": 99000000, "dur": 5}\n{"half')
    write_trace(tmp_path / "timeline", tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {os.getpid(): "policy", 77: "engine"}
    spans = {e["name"]: (e["ts"], e["dur"], e["pid"]) for e in events if e["ph"] == "X"}
    assert spans == {
        "generate": (0, 5, 77),
        "wait": (1_000_000, 500_000, os.getpid()),
        "train": (1_500_000, 1_500_000, os.getpid()),
    }


def test_without_a_folder_nothing_is_recorded(tmp_path):
    timeline = Timeline(None, "policy")
    with timeline.span("a"), timeline.overlapping("b"):
        pass
    timeline.close()
    write_trace(tmp_path / "none", tmp_path / "timeline.json")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] == []


def test_overlapping_spans_take_lanes_of_their_own_and_give_them_back(tmp_path):
    timeline = Timeline(tmp_path, "rollout")
    with timeline.overlapping("first"):
        with timeline.overlapping("second"):
            pass
        with timeline.overlapping("third"):
            pass
    lanes = {e["name"]: e["tid"] for (events,) in [read_spans(tmp_path).values()] for e in events}
    assert lanes == {"first": 1, "second": 2, "third": 2}


def test_close_activities_are_one_span_with_their_counts_summed(tmp_path):
    timeline = Timeline(tmp_path, "engine")
    bursts = Bursts(timeline, "generate", gap=0.01, longest=1.0)
    bursts.add(0.0, 0.1, tokens=3)
    bursts.add(0.105, 0.2, tokens=4)
    bursts.add(0.5, 0.6, tokens=1)
    bursts.add(0.6, 1.7, tokens=1)  # together they would be too long
    bursts.flush()
    bursts.flush()
    (events,) = read_spans(tmp_path).values()
    assert [(e["ts"], e["dur"], e["args"]) for e in events] == [
        (0, 200_000, {"n": 2, "tokens": 7}),
        (500_000, 100_000, {"n": 1, "tokens": 1}),
        (600_000, 1_100_000, {"n": 1, "tokens": 1}),
    ]


def test_unfinished_lines_are_passed_over(tmp_path):
    (tmp_path / "engine-1.jsonl").write_text('{"name": "a", "ts": 1, "args": {}\n{"name": "b", "ts": 2, "args": {}}\n{"na')
    assert [e["name"] for e in read_spans(tmp_path)["engine-1"]] == ["b"]


def test_a_full_disk_ends_the_timeline_and_nothing_else(tmp_path):
    timeline = Timeline(tmp_path, "engine")
    timeline._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    with timeline.span("generate"):
        pass
    timeline.add("generate", 0.0, 1.0)
    timeline.close()
