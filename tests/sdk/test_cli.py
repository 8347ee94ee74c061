"""What the command line hands to the SDK."""

from typing import Any

import pytest
from typer.testing import CliRunner

from relax_sdk.cli import app
from relax_sdk.errors import ConfigError


def test_options_of_train_reach_the_trainer(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, Any] = {}

    def trainer(*_: Any, **settings: Any) -> None:
        seen.update(settings)
        raise ConfigError("enough is known")

    monkeypatch.setattr("relax_sdk.trainer.Trainer", trainer)
    options = ["--bus", "transfer_queue", "--runtime", "ray", "--engines", "2", "--set", "rollout.group_size=8"]
    done = CliRunner().invoke(app, ["train", "tone-v0", *options])
    assert isinstance(done.exception, ConfigError)
    assert (seen["bus"], seen["runtime"], seen["engines"], seen["rollout"]) == ("transfer_queue", "ray", 2, {"group_size": 8})


def test_a_bus_that_there_is_not_is_named():
    done = CliRunner().invoke(app, ["train", "tone-v0", "--bus", "nowhere"])
    assert done.exit_code == 2 and "nowhere" in done.output
