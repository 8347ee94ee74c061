"""What all trackers have in common: they are told everything in order, and none ends or slows a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from relax_server.trackers import SampleAnswer, TrackedRun, Tracker, Trackers, delivery, make_trackers, register_tracker
from relax_server.trackers.base import End

import relax_sdk as relax
from relax_sdk.config import RunConfig, TrackingConfig, run_config_from_dict


class Listening(Tracker):
    """Keeps what it is told; raises, or waits, where it is told to.

    Args:
        raises_in: name of a method.
        gate: every call waits for it.
    """

    def __init__(self, raises_in: str = "", gate: threading.Event | None = None) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.raises_in, self.gate = raises_in, gate

    def _hear(self, name: str, *what: Any) -> None:
        if self.gate is not None:
            self.gate.wait(30)
        self.heard.append((name, *what))
        if name == self.raises_in:
            raise SystemExit("no network")

    def begin(self, run: TrackedRun) -> None:
        self._hear("begin", run.name)

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        self._hear("figures", step, dict(figures))

    def samples(self, step: int, samples: Sequence[SampleAnswer]) -> None:
        self._hear("samples", step, *samples)

    def warning(self, step: int, text: str) -> None:
        self._hear("warning", step, text)

    def close(self, end: End) -> None:
        self._hear("close", end)


def begun(folder: Path, warnings: list[str], **trackers: Tracker) -> Trackers:
    """Trackers of a new run."""
    made = Trackers(trackers, TrackedRun(folder, RunConfig("tone-v0")), warnings.append)
    made.begin()
    return made


async def test_a_tracker_is_told_all_of_a_run_in_order(tmp_path):
    listening, warnings = Listening(), []
    trackers = begun(tmp_path / "tone", warnings, listening=listening)
    sample = {"which": "best", "task": 0, "asked": "A or B?", "answer": "B", "reward": "1.000", "media": []}
    trackers.row({"step": 1, "reward": 0.5, "kl": float("nan"), "rewards": {"env": 0.5}, "samples": [sample]})
    trackers.row({"step": 2, "reward": 0.75})
    trackers.warning(2, "reward 0 for ten steps")
    trackers.row({"step": 1, "reward": 0.5, "rewards": {"env": 0.5}, "samples": [sample], "eval_reward": 0.25})
    await trackers.close("stopped")
    assert listening.heard == [
        ("begin", "tone"),
        ("figures", 1, {"step": 1.0, "reward": 0.5, "rewards/env": 0.5}),
        ("samples", 1, SampleAnswer("best", "A or B?", "B", "1.000")),
        ("figures", 2, {"step": 2.0, "reward": 0.75}),
        ("warning", 2, "reward 0 for ten steps"),
        ("figures", 1, {"eval_reward": 0.25}),  # what is new alone
        ("close", "stopped"),
    ]
    assert warnings == []


async def test_a_tracker_that_fails_is_told_of_once_and_the_others_go_on(tmp_path):
    failing, well, warnings = Listening("figures"), Listening(), []
    trackers = begun(tmp_path, warnings, failing=failing, well=well)
    for step in range(1, 4):
        trackers.row({"step": step})
    await trackers.close("done")
    assert [call[0] for call in failing.heard] == ["begin", "figures", "close"]
    assert [call[0] for call in well.heard] == ["begin", "figures", "figures", "figures", "close"]
    (told,) = warnings
    assert told.startswith("tracker failing raised SystemExit: no network") and "the run goes on without it" in told


async def test_a_tracker_that_hangs_slows_nothing_and_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(delivery, "CLOSE_SECONDS", 0.2)
    gate, warnings = threading.Event(), []
    hanging = Listening(gate=gate)
    trackers = begun(tmp_path, warnings, hanging=hanging)
    began = time.monotonic()
    for step in range(delivery.QUEUE * 3):
        trackers.row({"step": step})
    await trackers.close("done")
    assert time.monotonic() - began < 20, "no call waited for the tracker, whose gate holds it for 30 s"
    assert len(warnings) == 2 and "too slow" in warnings[0] and "is left behind" in warnings[1]
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "tracker hanging")
    gate.set()
    thread.join(20)
    assert not thread.is_alive() and hanging.heard[-1] == ("close", "done")
    assert len(hanging.heard) <= delivery.QUEUE + 2, "what waits is bounded"


def test_a_program_adds_a_tracker_of_its_own(tmp_path):
    register_tracker("listening", Listening)
    register_tracker("listening", Listening)  # a notebook's cell may run twice
    with pytest.raises(relax.RegistryError, match="choose another name"):
        register_tracker("listening", Tracker)
    made = make_trackers(TrackingConfig(("listening",), {"listening": {"raises_in": "begin"}}))
    assert isinstance(made["listening"], Listening) and made["listening"].raises_in == "begin"
    file = tmp_path / "mine.py"
    file.write_text("from relax_server.trackers import Tracker\nclass Mine(Tracker):\n    pass\n")
    (mine,) = make_trackers(TrackingConfig((f"{file}:Mine",))).values()
    assert type(mine).__name__ == "Mine"


@pytest.mark.parametrize(
    "tracking, text",
    [
        ({"trackers": ["wandbb"]}, "no tracker 'wandbb'; there are .*mlflow.*wandb"),
        ({"trackers": ["wandb"], "options": {"wandb": {"projekt": "x"}}}, "projekt.*allowed: project, entity"),
        ({"trackers": ["wandb"], "options": {"mlflow": {}}}, "mlflow is none of them"),
        ({"trackers": ["wandb", "wandb"]}, "each name once"),
        ({"trackers": ["wandb"], "options": {"wandb": "x"}}, "by its name"),
        ({"trackers": "wandb"}, "a list of texts"),
        ({"trackers": ["no_such_module:Class"]}, "cannot be imported"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value),
)
def test_mistakes_in_the_settings_are_named(tracking, text):
    with pytest.raises(relax.ConfigError, match=text):
        make_trackers(run_config_from_dict({"env": "tone-v0", "tracking": tracking}).tracking)


def test_a_tracker_whose_package_is_missing_names_the_extra(monkeypatch):
    from relax_server.trackers import base

    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    for name in ("wandb", "mlflow"):
        with pytest.raises(relax.ConfigError, match=rf"pip install 'relax-gym\[{name}\]'"):
            make_trackers(TrackingConfig((name,)))
