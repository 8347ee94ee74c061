"""How `Trainer` puts its settings together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_sdk import ConfigError, Env, Trainer
from relax_sdk.config import RunConfig


class Silent(Env):
    """An environment that nothing is played in."""


def run_folder(folder: Path) -> Path:
    config = RunConfig(env="silent-v0", steps=8)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def test_settings_may_be_changed_where_a_run_goes_on(tmp_path: Path) -> None:
    trainer = Trainer.from_run(run_folder(tmp_path), Silent, change={"optimizer": {"lr": 1e-5}})
    assert trainer.config.optimizer.lr == 1e-5
    assert trainer.config.optimizer.warmup_steps == RunConfig("silent-v0").optimizer.warmup_steps
    assert trainer.config.steps == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimiser": {"lr": 1e-5}}, "no section 'optimiser'"),
        ({"optimizer": {"rate": 1e-5}}, "no field 'rate'"),
        ({"optimizer": {"lr": -1.0}}, "OptimizerConfig.lr"),
    ],
)
def test_changes_are_checked(tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer.from_run(run_folder(tmp_path), Silent, change=change)
