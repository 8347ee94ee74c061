"""Environments that run out of memory, or take their process with them: the run goes on, or ends with a clear word."""

import itertools
import os
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout

import relax_sdk as relax

SMALL = dict(
    rollout={"groups_per_step": 2, "group_size": 4, "max_turns": 1},
    sampling={"max_new_tokens": 1},
    eval={"every": 0, "limit": 2},
)
FOLDER = "RELAX_TEST_FOLDER"


class Hungry(relax.Env):
    """Every fourth training episode asks for more memory than there is."""

    tasks = staticmethod(lambda: {"train": [{"n": n} for n in range(64)], "eval": [{"n": 0}]})
    resets = itertools.count()
    """Counted over all episodes, as the episodes of one group have one seed."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if next(self.resets) % 4 == 3 and options["task"]["n"]:
            np.ones(1 << 60)
        return "say a", {}

    def step(self, action):
        return None, float("a" in action.text.lower()), True, False, {}


class Deadly(Hungry):
    """Task 5 ends the process the first time, as the kernel does when memory runs out; task 9 ends it always, if told to."""

    def reset(self, *, seed=None, options=None):
        n, folder = options["task"]["n"], Path(os.environ[FOLDER])
        if (n == 5 and not (folder / "killed").exists()) or (n == 9 and (folder / "always").exists()):
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "say a", {}


def test_episodes_that_run_out_of_memory_fail_alone(tmp_path):
    rollout = SMALL["rollout"] | {"on_failure": "count"}
    run = relax.Trainer(Hungry, folder=tmp_path / "run", **SMALL | {"rollout": rollout}).fit(steps=4, progress=False)
    ended = sum((Counter(row["status"]) for row in run.metrics), Counter())
    assert ended.keys() == {"completed", "failed"} and ended.total() == 4 * 2 * 4
    assert ended["completed"] > ended["failed"]


def test_an_environment_that_takes_its_process_along_costs_a_restart(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    run = relax.Trainer(Deadly, folder=tmp_path / "run", **SMALL).fit(steps=4, progress=False)
    assert (tmp_path / "killed").exists()
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    assert (counts.acked, counts.leased) == (8, 0)


@pytest.mark.nightly
def test_a_task_that_always_kills_ends_the_run_and_says_how_to_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    (tmp_path / "killed").touch()
    (tmp_path / "always").touch()
    trainer = relax.Trainer(Deadly, folder=tmp_path / "run", **SMALL)
    with pytest.raises(relax.RunError, match=r"the rollout ended 6 times(.|\n)*SIGKILL.*memory(.|\n)*relax train --resume"):
        trainer.fit(steps=8, progress=False)
    (tmp_path / "always").unlink()
    run = relax.Trainer(Deadly, folder=tmp_path / "run", **SMALL).fit(steps=8, resume=True, progress=False)
    assert run.metrics[-1]["step"] == 8
