"""Which GPUs each process of a run sees: decided by numbers alone, so that it is tried without any."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from relax_server.models.device import gpu_missed
from relax_server.roles.devices import NONE, VISIBLE, Shares, allot, engine_size, shares, visible_gpus
from relax_server.roles.placement import LocalPlacement
from relax_server.roles.process import RoleProcess

import relax_sdk as relax
from relax_sdk.config import RunConfig
from relax_sdk.devices import DevicesConfig
from relax_sdk.layout import LayoutConfig

FOUR = ["0", "1", "2", "3"]


def config(**values: Any) -> RunConfig:
    return RunConfig("tone-v0", **values)


def test_a_machine_without_a_gpu_needs_no_numbers():
    assert allot(config(), []) == NONE
    with pytest.raises(relax.ConfigError, match=r"devices\.trainer names GPU 0, and this program sees no GPUs"):
        allot(config(devices=DevicesConfig(trainer=(0,))), [])


def test_flex_attention_is_refused_where_no_gpu_is() -> None:
    wanted = config(training=relax.TrainingConfig(attention="flex"))
    with pytest.raises(relax.ConfigError, match=r"training\.attention = 'flex' needs an NVIDIA GPU"):
        allot(wanted, [])
    with pytest.raises(relax.ConfigError, match=r"training\.attention = 'flex' needs an NVIDIA GPU"):
        shares(wanted, 0, reference=False)
    assert allot(wanted, ["0"]).of_role("policy") == {VISIBLE: "0"}


def test_one_gpu_does_everything():
    devices = allot(config(engines=2), ["0"])
    assert devices.of_role("policy") == devices.of_engine(0) == devices.of_engine(1) == {VISIBLE: "0"}


@pytest.mark.parametrize(
    "values, trainer, engines, reference",
    [
        ({}, ["0"], ("1", "2", "3"), "3"),
        ({"layout": LayoutConfig(tp=2)}, ["0", "1"], ("2", "3"), "3"),
        ({"layout": LayoutConfig(tp=2), "engines": 2}, ["0", "1"], ("2", "3"), "1"),
        ({"layout": LayoutConfig(tp=2, dp=2)}, FOUR, ("0", "1", "2", "3"), "3"),
        ({"mode": "colocate", "max_staleness": 0, "engines": 4}, ["0"], ("0", "1", "2", "3"), "0"),
        ({"engine": "sglang", "engine_flags": ("--tp", "2")}, ["0"], ("1,2",), "0"),
        ({"devices": DevicesConfig((3,), (0, 1), (2,)), "engines": 2}, ["3"], ("0", "1"), "2"),
        ({"devices": DevicesConfig(engines=(0,))}, ["0"], ("0",), "0"),
        ({"devices": DevicesConfig(reference=(1,))}, ["0"], ("2", "3"), "1"),
    ],
)
def test_four_gpus(values: dict[str, Any], trainer: list[str], engines: tuple[str, ...], reference: str) -> None:
    devices = allot(config(**values), FOUR)
    names = ["policy", *(f"policy-{rank}" for rank in range(1, len(trainer)))]
    assert [devices.of_role(name)[VISIBLE] for name in names] == trainer
    assert devices.engines == engines and devices.of_role("reference")[VISIBLE] == reference
    assert devices.of_role("rollout") == {}, "it does not compute on one"


@pytest.mark.parametrize(
    "values, says",
    [
        ({"layout": LayoutConfig(tp=8)}, "layout tp=8 has 8 trainer processes.* sees 4 GPUs"),
        ({"layout": LayoutConfig(tp=2), "devices": DevicesConfig(trainer=(0,))}, "it has 2 processes, one GPU for each"),
        ({"devices": DevicesConfig(engines=(4,))}, r"devices\.engines names GPU 4, and this program sees 4 GPUs"),
        ({"engine": "sglang", "engine_flags": ("--tp=4",)}, "divide an engine over 4 GPUs, and 3 of 4 GPUs are for engines"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(values: dict[str, Any], says: str) -> None:
    with pytest.raises(relax.ConfigError, match=says):
        allot(config(**values), FOUR)


@pytest.mark.parametrize("values", [{"trainer": (0, 0)}, {"engines": (-1,)}, {"reference": (0, 1)}, {"trainer": ("0",)}])
def test_numbers_that_are_none_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(relax.ConfigError, match="allowed"):
        DevicesConfig(**values)


def test_auto_and_numbers_are_settings_of_a_trainer():
    assert relax.Trainer("tone-v0", devices="auto").config.devices == DevicesConfig()
    assert relax.Trainer("tone-v0", devices={"trainer": [1]}).config.devices == DevicesConfig((1,))


@pytest.mark.parametrize(
    ("build", "there", "told"), [(None, False, ""), ("12.6", True, ""), ("12.6", False, "CUDA 12.6 and finds no")]
)
def test_a_build_for_gpus_that_finds_none_is_told_of(
    build: str | None, there: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", build)
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    assert told in gpu_missed() and bool(told) == bool(gpu_missed())


def test_flags_that_divide_an_engine():
    assert engine_size(["--tp", "2", "--pp-size=2"]) == 4 and engine_size(["--tp"]) == engine_size(["--mem", "2"]) == 1


def test_gpus_are_those_that_the_driver_knows_and_the_program_may_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    assert visible_gpus(tmp_path / "none") == []
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    assert visible_gpus(tmp_path) == ["0", "1"]
    monkeypatch.setenv(VISIBLE, "1, MIG-7")
    assert visible_gpus(tmp_path) == ["1", "MIG-7"]
    for nothing in ("", "-1"):
        monkeypatch.setenv(VISIBLE, nothing)
        assert visible_gpus(tmp_path) == []


async def test_processes_are_started_with_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = LocalPlacement(allot(config(engines=2), FOUR[:3]))
    seen: list[dict[str, str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda *args, env, **kwargs: seen.append(env))
    for name in ("policy", "rollout"):
        role = placement.role(name, tmp_path, lambda message: None)
        assert isinstance(role, RoleProcess)
        role._spawn().close()
    assert [env.get(VISIBLE) for env in seen] == ["0", os.environ.get(VISIBLE)]
    from relax_server.engines.settings import EngineSettings

    logs = [tmp_path / f"engine-{id}.log" for id in ("e1", "e2", "e3", "e1")]
    engines: list[Any] = [placement.engine("embedded", tmp_path, log, EngineSettings()) for log in logs]
    assert [engine._settings.env[VISIBLE] for engine in engines] == ["1", "2", "1", "1"]


@pytest.mark.parametrize(
    "values, gpus, wanted",
    [
        ({}, 0, Shares()),
        ({"engines": 2}, 4, Shares(1.0, 1.0, 1.0)),
        ({"engines": 2}, 1, Shares(0.25, 0.25, 0.25)),
        ({"engines": 4}, 4, Shares(0.66, 0.66, 0.66)),
        ({"layout": LayoutConfig(tp=2), "engine": "vllm", "engine_flags": ("-tp=2",)}, 8, Shares(1.0, 2.0, 1.0)),
        ({"mode": "colocate", "max_staleness": 0}, 1, Shares(0.33, 0.33, 0.33)),
    ],
)
def test_shares_of_the_gpus_of_a_cluster(values: dict[str, Any], gpus: int, wanted: Shares) -> None:
    assert shares(config(**values), gpus, reference=True) == wanted


def test_a_cluster_that_cannot_give_the_gpus_is_refused():
    with pytest.raises(relax.ConfigError, match="in a Ray cluster Ray chooses them"):
        shares(config(devices=DevicesConfig((0,))), 4, reference=False)
    with pytest.raises(relax.ConfigError, match="has 2 GPUs, and the run takes 3: 2 for layout tp=2, 1 for each of 1 engines;"):
        shares(config(layout=LayoutConfig(tp=2)), 2, reference=False)
