"""How `Trainer` puts its settings together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import relax_envs  # noqa: F401

from relax_sdk import FROM_SCRATCH, ConfigError, Env, Trainer
from relax_sdk.config import AlgorithmConfig, OptimizerConfig, RunConfig
from relax_sdk.defaults import from_random_weights
from relax_sdk.registry import EnvSpec, list_envs


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


# ------------------------------------------------------------------------------------------ defaults that suit the model

OWN = {"rollout": {"max_turns": 3}, "algorithm": {"credit": "turn"}, "from_scratch": {**FROM_SCRATCH, "warmup": {"steps": 9}}}
PRETRAINED = ["relax/smollm2-135m", "models/mine"]


def chosen(trainer: Trainer) -> tuple[float, float, float, int]:
    config = trainer.config
    return config.optimizer.lr, config.algorithm.entropy_coef, config.algorithm.kl_coef, config.warmup.steps


@pytest.mark.parametrize("model", PRETRAINED)
def test_what_suits_random_weights_does_not_reach_a_pretrained_model(model: str) -> None:
    assert not from_random_weights(model)
    assert chosen(Trainer(Silent, model)) == (1e-6, 0.0, 0.0, 0)
    trainer = Trainer(EnvSpec("silent-v0", Silent, defaults=OWN), model)
    assert chosen(trainer) == (1e-6, 0.0, 0.0, 0)
    assert (trainer.config.rollout.max_turns, trainer.config.algorithm.credit) == (3, "turn")


def test_random_weights_get_what_they_need() -> None:
    assert from_random_weights("relax/tiny-qwen3")
    assert chosen(Trainer(Silent, "relax/tiny-qwen3")) == (5e-4, 0.01, 0.0, 60)
    assert chosen(Trainer(EnvSpec("silent-v0", Silent, defaults=OWN))) == (1e-3, 0.0, 0.03, 9)


@pytest.mark.parametrize("model", ["relax/tiny-omni", *PRETRAINED])
def test_what_the_user_chooses_wins(model: str) -> None:
    spec = EnvSpec("silent-v0", Silent, defaults=OWN)
    trainer = Trainer(
        spec, model, optimizer={"lr": 3e-5}, algorithm={"entropy_coef": 0.002, "kl_coef": 0.1}, warmup={"steps": 4}
    )
    assert chosen(trainer) == (3e-5, 0.002, 0.1, 4)
    trainer = Trainer(spec, model, optimizer=OptimizerConfig(warmup_steps=3), algorithm=AlgorithmConfig(advantage="rloo"))
    assert chosen(trainer)[:3] == (1e-6, 0.0, 0.0), "an object is taken as it is"


@pytest.mark.parametrize("env", sorted(spec.id for spec in list_envs() if str(spec.entry).startswith("relax_envs.")))
def test_environments_that_ship_do_not_destroy_a_pretrained_model(env: str) -> None:
    lr, entropy, _, warmup = chosen(Trainer(env, PRETRAINED[0]))
    assert (lr, entropy, warmup) == (1e-6, 0.0, 0)
    assert chosen(Trainer(env))[0] >= 5e-4


def test_greedy_sampling_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    trainer = Trainer("tone-v0", folder=tmp_path / "run", sampling={"temperature": 0.0})
    with pytest.raises(ConfigError, match=r"sampling.temperature = 0 makes all answers.*above 0"):
        trainer.fit(steps=1, progress=False)
    assert not (tmp_path / "run").exists()
