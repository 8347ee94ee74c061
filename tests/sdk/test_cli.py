"""What the command line hands to the SDK."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from relax_sdk.cli import app
from relax_sdk.errors import ConfigError
from relax_sdk.run import Run
from relax_sdk.trainer import Trainer


def test_options_of_train_reach_the_trainer(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, Any] = {}

    def trainer(*_: Any, **settings: Any) -> None:
        seen.update(settings)
        raise ConfigError("enough is known")

    monkeypatch.setattr("relax_sdk.trainer.Trainer", trainer)
    options = ["--bus", "transfer_queue", "--runtime", "ray", "--engines", "2", "--set", "rollout.group_size=8"]
    options += ["--tracker", "wandb", "--tracker", "prometheus", "--set", "tracking.options={'prometheus': {'port': 0}}"]
    done = CliRunner().invoke(app, ["train", "tone-v0", *options])
    assert isinstance(done.exception, ConfigError)
    assert (seen["bus"], seen["runtime"], seen["engines"], seen["rollout"]) == ("transfer_queue", "ray", 2, {"group_size": 8})
    assert seen["tracking"] == {
        "trackers": ["tensorboard", "wandb", "prometheus"],
        "options": {"prometheus": {"port": 0}},
    }


@pytest.mark.parametrize(
    "command", [["train", "tone-v0"], ["eval", "tone-v0", "--engine-url", "http://x/v1", "--engine-model", "m"]]
)
@pytest.mark.parametrize("section", ["rolout", "mode"])
def test_a_section_that_there_is_not_is_named(command: list[str], section: str):
    done = CliRunner().invoke(app, [*command, "--set", f"{section}.group_size=8"])
    assert isinstance(done.exception, ConfigError), done.exception
    assert f"no section '{section}'" in str(done.exception) and "rollout" in str(done.exception)


def test_a_bus_that_there_is_not_is_named():
    done = CliRunner().invoke(app, ["train", "tone-v0", "--bus", "nowhere"])
    assert done.exit_code == 2 and "nowhere" in done.output


def test_a_run_s_senses_are_checked_at_its_end_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fitted: list[bool] = []

    def fit(self: Trainer, steps: int | None, resume: bool) -> Run:
        fitted.append(self.config.eval.check_senses)
        return Run(tmp_path, self.config)

    monkeypatch.setattr("relax_sdk.trainer.Trainer.fit", fit)
    for more in ([], ["--check-senses"], ["--set", "eval.check_senses=true"]):
        done = CliRunner().invoke(app, ["train", "tone-v0", *more])
        assert done.exit_code == 0, done.output
    assert fitted == [False, True, True]


def test_the_version_is_told():
    import relax_sdk

    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0 and done.output.strip() == f"relax-gym {relax_sdk.__version__}"


@pytest.mark.parametrize("command", [[], ["train"], ["eval"], ["doctor"], ["envs", "show"]])
def test_help_has_examples(command: list[str]):
    done = CliRunner().invoke(app, [*command, "--help"], terminal_width=200)
    examples = [line.strip() for line in done.output.splitlines() if line.strip().startswith("relax ")]
    assert done.exit_code == 0 and len(examples) >= 2, done.output


def test_shells_can_complete_commands():
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).output


@pytest.mark.parametrize(
    ("env", "shows"),
    [("tone-v0", "<audio 1.00 s, audio/"), ("colour-v0", "<image "), ("motion-v0", "<video "), ("higher-lower-v0", "?")],
)
def test_what_an_environment_first_shows(env: str, shows: str):
    done = CliRunner().invoke(app, ["envs", "show", env])
    assert done.exit_code == 0 and "first observation:\n  user: " in done.output, done.output
    assert shows in done.output.partition("first observation:")[2]
