"""Episodes that outlive the weights they began with: kept, marked token by token, and trained on."""

import asyncio

from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout

import relax_sdk as relax
from relax_sdk.trajectory import token_versions

TURNS, GROUPS, SIZE, STEPS, STALENESS = 4, 2, 2, 8, 4


class Patient(relax.Env):
    """Four turns; the environment thinks for a third of a second in each, longer than a step takes."""

    def __init__(self):
        self.turn = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "count", {}

    async def step(self, action):
        await asyncio.sleep(0.3)
        self.turn += 1
        return f"{self.turn}", float(len(action.text) % 2), self.turn == TURNS, False, {}


def test_episodes_live_through_weight_updates(tmp_path):
    settings = dict(
        rollout={"groups_per_step": GROUPS, "group_size": SIZE},
        sampling={"max_new_tokens": 4},
        max_staleness=STALENESS,
        eval={"every": 0, "limit": 2},
    )
    run = relax.Trainer(Patient, folder=tmp_path / "run", **settings).fit(steps=STEPS, progress=False)
    journal = open_journal(RunLayout(run.folder).journal)
    groups = journal.groups(run.folder.name, limit=100)
    journal.close()
    spans = []
    for group in groups:
        for trajectory in group.trajectories:
            versions = [v for turn in trajectory.turns for v in token_versions(turn)]
            assert versions == sorted(versions) and len(versions) == trajectory.n_response_tokens
            spans.append(versions[-1] - versions[0])
    assert max(spans) >= 1, "no episode saw a weight update"
    assert [row["step"] for row in run.metrics] == list(range(1, STEPS + 1))
    for row in run.metrics:
        seen = {int(age): n for age, n in row["staleness_histogram"].items()}
        assert max(seen) <= STALENESS and min(seen) >= 0
        assert row["staleness_max"] == max(seen) and sum(seen.values()) == row["n_samples"] == GROUPS * SIZE
