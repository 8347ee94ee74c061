"""A machine that has run out of memory or disk is told from a damaged folder, with what to do."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
from relax_server.machine_limits import check_room, limits_told
from relax_server.models.catalog import resolve_model

from relax_sdk import ConfigError, DiskFull, OutOfMemory


def load_with_little_memory(path: Path, where: str) -> tuple[str, str]:
    """Make a policy where an address space is all but used up at one of its parts; what it raised."""
    import resource

    import psutil
    from relax_server.training import policy
    from relax_server.training.megatron import build
    from training_data import make_policy

    make_policy(path)  # what is imported and patched needs memory of its own
    module: Any = build if where == "build_model" else policy
    original, limits = getattr(module, where), resource.getrlimit(resource.RLIMIT_AS)

    def in_little(*args: Any, **kwargs: Any) -> Any:
        import torch

        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 20), limits[1]))
        torch.zeros(1 << 28)
        return original(*args, **kwargs)

    setattr(module, where, in_little)
    try:
        make_policy(path)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        setattr(module, where, original)
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return "", ""


@pytest.mark.parametrize(
    ("where", "what"),
    [("build_model", "the model cannot be loaded"), ("MegatronTrainer", "gradients and optimizer cannot be allocated")],
)
def test_a_model_that_does_not_fit_into_memory_says_so(worker, where, what):
    kind, said = worker.run(load_with_little_memory, resolve_model("relax/tiny-llama"), where)
    assert kind == "OutOfMemory"
    assert re.search(rf"{what} .*GB of the machine's memory are available: .*training\.dtype", said)


def step_with_little_memory(path: Path) -> tuple[str, str]:
    """Train a step for which the machine has no memory left; what it raised."""
    import resource

    import psutil
    from training_data import letter_groups, make_policy, read

    policy = make_policy(path)
    policy.train_step(letter_groups(policy.processor), read, 0)
    original, limits = policy.trainer.step, resource.getrlimit(resource.RLIMIT_AS)

    def in_little(lr: float) -> Any:
        import torch

        resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (1 << 20), limits[1]))
        torch.zeros(1 << 28)
        return original(lr)

    policy.trainer.step = in_little
    try:
        policy.train_step(letter_groups(policy.processor), read, 1)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    return "", ""


def test_a_step_that_does_not_fit_into_memory_says_so(worker):
    kind, said = worker.run(step_with_little_memory, resolve_model("relax/tiny-llama"))
    assert kind == "OutOfMemory" and "a training step does not fit" in said and "training.dtype" in said


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_and_other_errors_pass(number, tmp_path):
    full = r"cannot be written .*the disk is full, \d+ bytes are free; make room"
    with pytest.raises(DiskFull, match=full), limits_told("it cannot be written", tmp_path, writes=True):
        raise OSError(number, os.strerror(number))
    with pytest.raises(OutOfMemory), limits_told("it cannot be read", tmp_path):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")
    for error in (KeyError("x"), ConfigError("no")):
        with pytest.raises(type(error)), limits_told("it cannot be read", tmp_path):
            raise error


def test_room_is_asked_for_before_anything_is_written(tmp_path):
    check_room(tmp_path / "not" / "there", 1000, "a model")
    with pytest.raises(DiskFull, match=r"no room for a model: it needs 1000000000000000000 bytes .* bytes .* are free; make"):
        check_room(tmp_path / "not" / "there", 10**18, "a model")
