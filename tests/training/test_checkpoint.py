"""Checkpoints: training goes on exactly as it would have, what does not fit is refused, and nothing is ever half written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from training_data import largest_difference, letter_groups, make_policy, parameters, read

from relax_sdk import CheckpointError

OMNI, TEXT = "relax/tiny-omni", "relax/tiny-qwen3"


def resume(folder: Path, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Six steps in one go, and three steps, a checkpoint, and three more in a new policy."""
    import torch

    def step(policy: Any, i: int) -> dict[str, float]:
        metrics = policy.train_step(letter_groups(policy.processor, seed=i), read, i)
        return {k: v for k, v in metrics.items() if not k.startswith("seconds")}

    whole = make_policy(name, **settings)
    whole.warmup_step([t.samples()[0] for g in letter_groups(whole.processor) for t in g.trajectories], read, 1e-3)
    for i in range(3):
        step(whole, i)
    whole.save(folder / "3", {"version": 3, "cursor": [1, 2]})
    torch.manual_seed(12345)
    state = torch.get_rng_state()
    rest = [step(whole, i) for i in range(3, 6)]

    resumed = make_policy(name, **settings)
    meta = resumed.load(folder / "3")
    at, generator = resumed.step, torch.get_rng_state()
    again = [step(resumed, i) for i in range(3, 6)]
    return {
        "meta": meta,
        "step": at,
        "generator restored": not torch.equal(generator, state),
        "metrics": rest == again,
        "weights": largest_difference(parameters(whole), parameters(resumed)),
        "moved": largest_difference(parameters(make_policy(name, **settings)), parameters(resumed)),
    }


@pytest.mark.parametrize(
    ("name", "settings"), [(OMNI, {}), (TEXT, {"kl_coef": 0.1, "weight_decay": 0.01}), (OMNI, {"dtype": "bfloat16"})]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(worker, tmp_path, name, settings):
    got = worker.run(resume, tmp_path, name, settings)
    assert got["meta"] == {"version": 3, "cursor": [1, 2]}
    assert got["step"] == 3
    assert got["metrics"]
    assert got["generator restored"]
    assert got["weights"] == 0
    assert got["moved"] > 1e-4


def save_then_load(folder: Path, saved: tuple[str, dict[str, Any]], loaded: tuple[str, dict[str, Any]]) -> int:
    make_policy(saved[0], **saved[1]).save(folder / "c", {})
    policy = make_policy(loaded[0], **loaded[1])
    policy.load(folder / "c")
    return policy.step


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((TEXT, {"beta1": 0.8}), r"optimizer\.beta1: 0\.9 in the checkpoint, 0\.8 here"),
        ((TEXT, {"advantage": "rloo", "clip_high": 0.3}), r"algorithm\.advantage: 'grpo'.*algorithm\.clip_high"),
        ((TEXT, {"dtype": "bfloat16"}), r"training\.dtype"),
        (("relax/tiny-llama", {}), r"model\.architectures.*model\.model_type: 'qwen3' in the checkpoint, 'llama' here"),
    ],
)
def test_checkpoints_of_other_runs_are_refused_with_the_differences(worker, tmp_path, other, message):
    with pytest.raises(CheckpointError, match=message):
        worker.run(save_then_load, tmp_path, (TEXT, {}), other)


def test_settings_that_do_not_change_the_step_may_change(worker, tmp_path):
    other = (TEXT, {"token_budget": 512, "keep_checkpoints": 5, "total_steps": 700})
    assert worker.run(save_then_load, tmp_path, (TEXT, {}), other) == 0


def damage(folder: Path, how: str) -> None:
    policy = make_policy(TEXT)
    policy.save(folder / "c", {})
    if how == "no header":
        (folder / "c" / "relax.json").unlink()
    elif how == "half a header":
        (folder / "c" / "relax.json").write_text('{"format": 1, "st')
    elif how == "another format":
        header = json.loads((folder / "c" / "relax.json").read_text())
        (folder / "c" / "relax.json").write_text(json.dumps(header | {"format": 99}))
    elif how == "cut data":
        data = max((folder / "c").glob("*.distcp"), key=lambda f: f.stat().st_size)
        data.write_bytes(data.read_bytes()[:1000])
    elif how == "missing":
        policy.load(folder / "nowhere")
    policy.load(folder / "c")


@pytest.mark.parametrize("how", ["no header", "half a header", "another format", "cut data", "missing"])
def test_damaged_checkpoints_are_refused(worker, tmp_path, how):
    with pytest.raises(CheckpointError):
        worker.run(damage, tmp_path, how)


def save_twice(folder: Path) -> dict[str, Any]:
    import psutil
    from relax_server.training.megatron import checkpoint

    policy = make_policy(TEXT)
    policy.save(folder / "c", {"n": 1})
    (folder / ".c.partial").mkdir()
    (folder / ".c.partial" / "left over").write_text("from a trainer that was killed")
    policy.step = 7
    policy.save(folder / "c", {"n": 2})
    header = checkpoint.read_header(folder / "c")
    try:
        policy.save(folder / "d", {"not plain": object()})
    except CheckpointError as error:
        failed = str(error)
    else:
        failed = ""
    return {
        "names": sorted(f.name for f in folder.iterdir()),
        "header": (header["step"], header["meta"]["meta"]),
        "failed": failed,
        "children": len(psutil.Process().children()),
    }


def test_a_checkpoint_is_replaced_whole(worker, tmp_path):
    got = worker.run(save_twice, tmp_path)
    assert got["header"] == (7, {"n": 2})
    assert "cannot be written" in got["failed"]
    assert got["names"] == [".d.partial", "c"]
    assert got["children"] == 0


def extended(folder: Path, settings: dict[str, Any], total: int) -> list[float]:
    """The learning rates of a run of eight steps, then of the steps after it under other settings."""
    policy = make_policy(TEXT, total_steps=8, warmup_steps=2, lr=1e-3)
    rates = [policy.train_step(letter_groups(policy.processor, 1, 2), read, i)["lr"] for i in range(8)]
    policy.save(folder / "c", {})
    other = make_policy(TEXT, total_steps=total, **{"warmup_steps": 2, "lr": 1e-3} | settings)
    other.load(folder / "c")
    rates += [other.train_step(letter_groups(other.processor, 1, 2), read, i)["lr"] for i in range(8, 10)]
    other.save(folder / "d", {})
    again = make_policy(TEXT, total_steps=total, **{"warmup_steps": 2, "lr": 1e-3} | settings)
    again.load(folder / "d")
    return [*rates, again.train_step(letter_groups(again.processor, 1, 2), read, 10)["lr"]]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, [5e-5, 5e-5, 5e-5]), ({"lr": 4.5e-4}, [2.5e-4, 4.5e-4, 4.5e-4 - (4.5e-4 * 0.95) / 6])],
)
def test_an_extended_run_goes_on_from_the_rate_reached(worker, tmp_path, settings, expected):
    rates = worker.run(extended, tmp_path, settings, 16)
    assert rates[:2] == pytest.approx([5e-4, 1e-3])
    assert rates[7] == pytest.approx(5e-5)
    assert rates[8:] == pytest.approx(expected)
