"""A run that fails before anything carries it out says so in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prepared_job import prepared_job
from relax_server.roles.events import read_events
from relax_server.roles.launch import Launch
from relax_server.roles.layout import RunLayout
from relax_server.viewer.base import ViewedRun
from relax_server.viewer.summary import Summaries

import relax_sdk as relax
from relax_sdk.runtime import Job


class Silent:
    """An observer that nobody looks at."""

    def stage(self, text: str) -> None: ...

    def step(self, metrics: dict[str, Any]) -> None: ...

    def warn(self, text: str) -> None: ...


def no_model(folder: Path) -> Job:
    return prepared_job(relax.Trainer("tone-v0", model=str(folder / "nowhere"), folder=folder / "run"), 3)


def no_journal(folder: Path) -> Job:
    job = prepared_job(relax.Trainer("tone-v0", folder=folder / "run"), 3)
    RunLayout(job.folder).journal.mkdir()
    return job


def no_tracker(folder: Path) -> Job:
    return prepared_job(relax.Trainer("tone-v0", folder=folder / "run", tracking={"trackers": ("nobody",)}), 3)


@pytest.mark.parametrize(("broken", "says"), [(no_model, "nowhere"), (no_journal, "journal"), (no_tracker, "nobody")])
async def test_a_run_that_cannot_begin_is_shown_as_failed_with_the_reason(broken: Any, says: str, tmp_path: Path) -> None:
    job = broken(tmp_path)
    layout = RunLayout(job.folder)
    layout.metrics.write_text(json.dumps({"step": 2, "reward": 0.5}) + "\n")
    layout.status.write_text(json.dumps({"state": "training", "step": 2}))
    with pytest.raises(relax.RelaxError) as caught:
        await Launch(job, Silent()).run()
    status = json.loads(layout.status.read_text())
    assert (status["state"], status["step"], status["steps"], status["roles"]) == ("failed", 2, 3, [])
    assert says in status["reason"] and status["reason"] == str(caught.value)
    last = list(read_events(layout.events))[-1]
    assert (last["kind"], last["level"], last["what"], last["step"]) == ("failed", "problem", str(caught.value), 2)
    run = ViewedRun("run", job.folder, "run", lambda: None, layout.media)
    assert Summaries().of(run)["state"] == "failed", "as the page has it, which has no other look at it"
