"""`relax check-senses`: what it plays, and that it ends with exit code 1 where a policy does not use what it is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decoding_endpoint import DecodingEndpoint
from typer.testing import CliRunner, Result

from relax_sdk import RunConfig, cli
from relax_sdk.evals.plan import EvalPlan
from relax_sdk.evals.senses import Condition, SensePass, SensesResults, Shown
from relax_sdk.run import CONFIG, WEIGHTS
from relax_sdk.runtime import Job, Tell

TASKS = 16
RIGHT = dict.fromkeys(range(TASKS), 1.0)
CHANCE = {task: float(task % 4 == 0) for task in range(TASKS)}


@pytest.fixture
def url() -> Iterator[str]:
    endpoint = DecodingEndpoint()
    yield endpoint.url
    endpoint.close()


def check(*arguments: str) -> Result:
    cli.add_commands()
    return CliRunner().invoke(cli.app, ["check-senses", *arguments])


@pytest.mark.parametrize(("hears", "code", "says"), [(True, 0, "**audio**: used: "), (False, 1, "the answers are the same")])
def test_a_model_behind_a_url(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hears: bool, code: int, says: str
) -> None:
    if not hears:
        monkeypatch.setattr("decoding_endpoint.hear", lambda wave: "B")
    options = ["--engine-url", url, "--engine-model", "decoder", "--limit", str(TASKS), "--out", str(tmp_path / "out")]
    done = check("tone-v0", *options)
    assert done.exit_code == code and says in done.output, done.output
    assert json.loads((tmp_path / "out" / "senses.json").read_text())["ok"] is (code == 0)


class Player:
    """Stands for an engine: the sounds are used, or they are not."""

    def __init__(self, deaf: bool) -> None:
        self.blind = RIGHT if deaf else CHANCE
        self.played: list[tuple[EvalPlan, str, str]] = []

    def play_senses(self, job: Job, plan: EvalPlan, model: str, tell: Tell) -> SensesResults:
        self.played.append((plan, model, job.config.model))
        passes = [_pass("as it is", "all", RIGHT), _pass("another task's", "all", CHANCE)]
        passes += [_pass(condition, "audio", self.blind) for condition in ("blanked", "shuffled")]
        shown = [Shown("audio", TASKS, TASKS, 0, TASKS)]
        return SensesResults(job.spec.id, model, plan.split, TASKS, ["audio"], shown, passes)


def _pass(condition: Condition, kind: str, rewards: dict[int, float]) -> SensePass:
    return SensePass(condition, kind, rewards, {task: f"{condition} {task}" for task in rewards})


@pytest.mark.parametrize("deaf", [False, True])
def test_an_environment_and_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool) -> None:
    monkeypatch.setattr("relax_sdk.evals.check.find_runtime", lambda name: player)
    player = Player(deaf)
    done = check("tone-v0", "relax/tiny-omni", "--limit", "5", "--out", str(tmp_path / "out"))
    assert done.exit_code == int(deaf) and ("not used" in done.output) is deaf, done.output
    [(plan, _, model)] = player.played
    assert (plan.limit, plan.weights, plan.endpoint, model) == (5, None, None, "relax/tiny-omni")


@pytest.mark.parametrize("order", ["run", "environment first"])
def test_the_trained_weights_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    run = tmp_path / "run"
    (run / WEIGHTS).mkdir(parents=True)
    (run / CONFIG).write_text(json.dumps(RunConfig("tone-v0", "relax/tiny-omni", steps=7).to_dict()))
    monkeypatch.setattr("relax_sdk.evals.check.find_runtime", lambda name: player)
    player = Player(deaf=False)
    done = check(*([str(run)] if order == "run" else ["tone-v0", str(run)]), "--out", str(tmp_path / "out"))
    assert done.exit_code == 0 and "What run uses of tone-v0" in done.output, done.output
    [(plan, model, _)] = player.played
    assert (plan.weights, plan.version, plan.label) == (run / WEIGHTS, 7, "run") and "run" in model


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--engine-url", "http://x/v1"], "--engine-model"),
        (["relax/tiny-omni", "--engine-url", "http://x/v1", "--engine-model", "m"], "--engine-model"),
        (["--split", "nowhere"], "nowhere"),
    ],
)
def test_what_does_not_go_together_is_refused(options: list[str], says: str) -> None:
    done: Any = check("tone-v0", *options)
    assert done.exit_code == 1 and says in str(done.exception)
