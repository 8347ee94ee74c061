"""Checkpoints: training goes on exactly as it would have, what does not fit is refused, and nothing is ever half written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from training_data import largest_difference, letter_groups, make_policy, parameters, read

from relax_sdk import CheckpointError

OMNI, TEXT = "relax/tiny-omni", "relax/tiny-qwen3"


def resume(folder: Path, name: str, settings: dict[str, Any], waits: bool) -> dict[str, Any]:
    """Six steps in one go, and three steps, a checkpoint, and three more in a new policy.

    `waits` has the six steps wait for the checkpoint, which is written while they are made otherwise.
    """
    import torch

    def step(policy: Any, i: int) -> dict[str, float]:
        metrics = policy.train_step(letter_groups(policy.processor, seed=i), read, i)
        return {k: v for k, v in metrics.items() if not k.startswith("seconds")}

    whole = make_policy(name, **settings)
    whole.warmup_step([t.samples()[0] for g in letter_groups(whole.processor) for t in g.trajectories], read, 1e-3)
    for i in range(3):
        step(whole, i)
    whole.begin_save(folder / "3", {"version": 3, "cursor": [1, 2]}, waits)
    if waits:
        whole.finish_save()
    torch.manual_seed(12345)
    state = torch.get_rng_state()
    rest = [step(whole, i) for i in range(3, 6)]
    whole.finish_save()

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
    ("name", "settings", "waits"),
    [(OMNI, {}, False), (TEXT, {"kl_coef": 0.1, "weight_decay": 0.01}, True), (OMNI, {"dtype": "bfloat16"}, False)],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(worker, tmp_path, name, settings, waits):
    got = worker.run(resume, tmp_path, name, settings, waits)
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
    elif how in ("one bit", "no data"):
        data = max((folder / "c").glob("*.distcp"), key=lambda f: f.stat().st_size)
        contents = bytearray(data.read_bytes())
        contents[len(contents) // 2] ^= 1
        data.unlink() if how == "no data" else data.write_bytes(contents)
    elif how == "missing":
        policy.load(folder / "nowhere")
    policy.load(folder / "c")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no header", r"not a checkpoint .*relax\.json"),
        ("half a header", r"relax\.json is damaged"),
        ("another format", "format 99"),
        ("cut data", r"damaged: \S+\.distcp has 1000 bytes, \d+ were written"),
        ("one bit", r"damaged: \S+\.distcp has other contents"),
        ("no data", r"damaged: \S+\.distcp is missing"),
        ("missing", "not a checkpoint"),
    ],
)
def test_damaged_checkpoints_are_refused(worker, tmp_path, how, message):
    with pytest.raises(CheckpointError, match=message):
        worker.run(damage, tmp_path, how)


def refused_by_the_machine(folder: Path, how: str) -> tuple[str, str, list[str]]:
    """A checkpoint that is whole, and a machine that cannot load or save it: the error, and what is left in the folder."""
    import errno
    import resource
    import shutil

    import torch
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    policy = make_policy(TEXT)
    policy.save(folder / "c", {})
    raised: dict[str, BaseException] = {
        "no memory": MemoryError("allocation failed"),
        "no device memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        "no host memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        "a failing disk": OSError(errno.EIO, "Input/output error"),
        "in another rank": CheckpointException("load", {1: _wrap_exception(MemoryError("allocation failed"))}),
    }
    original = dist_checkpointing.load

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise raised[how]

    limits = {
        "too many files": (resource.RLIMIT_NOFILE, 8),
        "large files": (resource.RLIMIT_FSIZE, 10_000),
        "a full disk": (resource.RLIMIT_FSIZE, 10_000),
    }
    limit, value = limits.get(how, (resource.RLIMIT_NOFILE, 0))
    soft, hard = resource.getrlimit(limit)
    if how in limits:
        resource.setrlimit(limit, (value, hard))
    else:
        dist_checkpointing.load = refuse
    usage = shutil.disk_usage
    if how == "a full disk":
        shutil.disk_usage = lambda path: usage(path)._replace(free=4096)  # type: ignore[assignment]
    try:
        policy.save(folder / "d", {}) if limit == resource.RLIMIT_FSIZE else policy.load(folder / "c")
    except Exception as error:
        kind, message = type(error).__name__, str(error)
    else:
        kind, message = "", ""
    finally:
        resource.setrlimit(limit, (soft, hard))
        dist_checkpointing.load, shutil.disk_usage = original, usage
    policy.load(folder / "c")
    return kind, message, [f.name for f in folder.iterdir()]


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("no memory", "OutOfMemory", r"MemoryError.*GB of the machine's memory are available: .*training\.dtype"),
        ("no device memory", "OutOfMemory", r"CUDA.*training\.token_budget"),
        ("no host memory", "OutOfMemory", "can't allocate memory.*GB of the machine's memory"),
        ("a failing disk", "TrainingError", "Input/output error"),
        ("in another rank", "OutOfMemory", "MemoryError: allocation failed"),
        ("too many files", "TrainingError", "Too many open files"),
        ("large files", "TrainingError", r"cannot be written now .*\d MB are free there"),
        ("a full disk", "DiskFull", r"cannot be written now .*the disk is full, 4096 bytes are free; make room"),
    ],
)
def test_a_machine_that_refuses_is_not_called_damage(worker, tmp_path, how, kind, message):
    got, said, left = worker.run(refused_by_the_machine, tmp_path, how)
    assert got == kind
    assert re.search(message, said) and "damaged (" not in said and "is damaged:" not in said
    assert left == ["c"], "nothing half written stays"


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
    assert got["names"] == ["c"]
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
