"""The live lines, as they are in a log."""

import base64
import queue
import threading
from pathlib import Path

import numpy as np
import pytest

import relax_sdk as relax
from relax_sdk import progress
from relax_sdk.config import RunConfig
from relax_sdk.media import MediaStore
from relax_sdk.progress import Display, NotebookDisplay, Progress, Waiting


@pytest.fixture(autouse=True)
def every_line(monkeypatch):
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0.0)


def test_what_is_waited_for_is_told_with_how_far_it_is(capsys):
    with Waiting("evaluation of tone-v0") as waiting:
        waiting.tell("3 of 8 episodes")
    assert capsys.readouterr().err == "evaluation of tone-v0 · 3 of 8 episodes · 0 s\n"


def test_the_seconds_go_on_where_nothing_is_told(monkeypatch):
    shown: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Shown(Display):
        def show(self, urgent: bool = False) -> None:
            shown.put(self.line())

    monkeypatch.setattr(progress, "make_display", lambda line, show: Shown(line))
    monkeypatch.setattr(progress, "TICK", 0.01)
    with Waiting("starting") as waiting:
        assert shown.get(timeout=10) == "starting · 0 s"
        waiting.started -= 70
        while shown.get(timeout=10) != "starting · 70 s":
            pass
    assert "waiting" not in {thread.name for thread in threading.enumerate()}, "it may still show something"


def test_a_run_says_how_it_goes_and_where_it_is(capsys):
    with Progress(RunConfig(env="tone-v0", steps=9), Path("there")) as run:
        run.stage("starting")
        run.step({"step": 4, "reward": 0.5, "seconds_step": 2.0, "seconds_train": 1.0})
        run.warn("an engine died")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("tone-v0: starting")
    assert lines[1].startswith("tone-v0 step 4/9 · reward 0.500") and "train 50%" in lines[1]
    assert lines[2] == "warning: an engine died" and lines[-1] == "done: there"


def test_counts_of_a_stage_do_not_fill_a_log(capsys, monkeypatch):
    monkeypatch.setattr(progress, "PLAIN_EVERY", 1000.0)
    with Progress(RunConfig(env="tone-v0", steps=9), Path("there")) as run:
        for text in ("warming up", *(f"warming up: {n} of 9 episodes" for n in range(9)), "waiting for the first groups"):
            run.stage(text)
    lines = capsys.readouterr().err.splitlines()[:-2]  # without the last state and where the run is
    assert [line.split(" · ")[0] for line in lines] == ["tone-v0: warming up", "tone-v0: waiting for the first groups"]


def test_warnings_are_seen_where_nothing_else_is_to_be_shown(capsys):
    with pytest.raises(KeyError), Progress(RunConfig(env="tone-v0"), Path("there"), show=False) as run:
        run.stage("starting")
        run.warn("an engine died")
        raise KeyError
    with Waiting("evaluation", show=False) as waiting:
        waiting.tell("3 of 8 episodes")
    assert capsys.readouterr().err == "warning: an engine died\n"


def test_a_line_that_stays_is_not_printed_again(capsys, monkeypatch):
    class Staying(Display):
        stays = True

    monkeypatch.setattr(progress, "make_display", lambda line, show: Staying(line))
    with Progress(RunConfig(env="tone-v0", steps=9), Path("there")) as run:
        run.step({"step": 4, "reward": 0.5, "seconds_step": 2.0})
    assert capsys.readouterr().err == "done: there\n"


def test_a_step_that_comes_again_with_an_evaluation_counts_once(capsys):
    samples = [{"which": "an answer", "task": 0, "asked": "?", "answer": "hm", "reward": "0.000", "media": []}]
    with Progress(RunConfig(env="tone-v0", steps=9), Path("there")) as run:
        run.step({"step": 1, "reward": 0.0, "seconds_step": 2.0, "samples": samples})
        run.step({"step": 2, "reward": 0.9, "seconds_step": 2.0})
        run.step({"step": 2, "reward": 0.9, "seconds_step": 2.0, "eval_reward": 0.25})
        assert "reward 0.450 · held-out 0.250" in run.line()
    with Progress(RunConfig(env="tone-v0", steps=9), Path("there")) as run:
        run.step({"step": 1, "reward": 0.0, "seconds_step": 2.0, "samples": samples})
        run.step({"step": 1, "reward": 0.0, "seconds_step": 2.0, "samples": samples, "eval_reward": 0.25})
    assert capsys.readouterr().err.count("step 1, an answer: '?' → 'hm' · reward 0.000") == 2


def test_a_notebook_shows_the_best_and_the_worst_answer_with_their_media(tmp_path):
    sound = relax.Audio.from_array(np.zeros(160, np.float32))
    ref = MediaStore(tmp_path / "media").put(sound)
    media = [{"kind": "audio", "sha256": ref.sha256}]
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, data, raw):
            shown.append(data)

    def display(data, raw, display_id):
        shown.append(data)
        return Handle()

    notebook = NotebookDisplay.__new__(NotebookDisplay)
    notebook._display, notebook._samples = display, None
    best = {"which": "best", "task": 3, "asked": "<audio> A or B?", "answer": "A<b>", "reward": "1.000", "media": media}
    notebook.samples(1, [best, best | {"which": "worst", "answer": "\x1b[2J", "reward": "0.000"}], tmp_path / "media")
    notebook.samples(50, [], tmp_path / "media")
    notebook.samples(50, [best], tmp_path / "nowhere")
    first, second = shown
    assert first["text/plain"].splitlines()[0] == "step 1, best: '<audio> A or B?' → 'A<b>' · reward 1.000"
    assert "\x1b" not in first["text/plain"] + first["text/html"]
    page = first["text/html"]
    assert page.count("<audio controls") == 2 and base64.b64encode(sound.bytes()).decode() in page
    assert "A&lt;b&gt;" in page and page.index("best · reward 1.000") < page.index("worst · reward 0.000")
    assert "<audio controls" not in second["text/html"] and f"&lt;audio, {ref.sha256[:12]}" in second["text/html"]


@pytest.mark.parametrize(("folder", "shown"), [("runs/tone", "runs/tone"), ("/elsewhere/tone", "/elsewhere/tone")])
def test_a_folder_is_named_as_in_the_current_one(capsys, tmp_path, monkeypatch, folder, shown):
    monkeypatch.chdir(tmp_path)
    with Progress(RunConfig(env="tone-v0"), tmp_path / folder):
        pass
    assert capsys.readouterr().err.endswith(f"done: {shown}\n")
