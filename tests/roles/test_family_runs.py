"""A short run of every architecture: engine, environment and trainer agree on its tokens, and weights go round."""

from pathlib import Path

import pytest
from local_runs import SAME_WEIGHTS, left_behind, trainer
from relax_server.models.families import TABLE, Family

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]


def env_of(family: Family) -> str:
    """An environment with all kinds of media that a family takes, or none."""
    if family.media is None:
        return "higher-lower-v0"
    return "motion-v0" if family.media.audio is None else "omni-quiz-v0"


@pytest.mark.parametrize("name", list(TABLE))
def test_engine_and_trainer_agree_while_weights_change(name: str, tmp_path: Path) -> None:
    family = TABLE[name]
    moe = "MoE" in name or name.startswith("Qwen3-Omni")
    settings = {"mode": "colocate", "max_staleness": 0, "training": {"checkpoint_every": 2, "replay_routes": moe}}
    settings["algorithm"] = {"entropy_coef": 0.01}  # which moves a model whose answers are all equally good, too
    media = {} if family.media is None else {"media": {"max_frames": 8, "max_tokens": 128}}
    run = trainer(tmp_path, env=env_of(family), model=family.tiny, **settings, **media).fit(steps=3, progress=False)
    assert [row["staleness_max"] for row in run.metrics] == [0, 0, 0]
    assert max(row["logprob_gap_max"] for row in run.metrics) <= SAME_WEIGHTS
    assert max(row["grad_norm"] for row in run.metrics) > 0
    assert left_behind() == []
