"""Which GPUs of this machine each process of a run sees."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_sdk.config import RunConfig
from relax_sdk.devices import DevicesConfig
from relax_sdk.errors import ConfigError
from relax_server.roles.process import rank_name
from relax_server.training.attention_way import LEAST_HEAD, attention_way

VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA = Path("/proc/driver/nvidia/gpus")
"""Has a folder for each GPU that the driver knows."""

SIZES = {"--tp", "--tp-size", "--tensor-parallel-size", "-tp", "--pp-size", "--pipeline-parallel-size", "-pp"}
"""Flags of SGLang and vLLM that divide one engine over several GPUs."""


def visible_gpus(driver: Path = NVIDIA) -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them; nothing is started on them.

    Args:
        driver: the driver's own list.
    """
    known = len(list(driver.iterdir())) if driver.is_dir() else 0
    told = os.environ.get(VISIBLE)
    if told is None or not known:
        return [str(number) for number in range(known)]
    return [name.strip() for name in told.split(",") if name.strip() not in ("", "-1")]


@dataclass(frozen=True)
class Devices:
    """GPUs by their names, as `CUDA_VISIBLE_DEVICES` has them."""

    roles: dict[str, str]
    """By name of the role; one that is not named sees all."""
    engines: tuple[str, ...] = ()
    """Each is for one engine, `2,3` where it is divided; engines beyond them share them. Empty: engines see all."""

    def of_role(self, name: str) -> dict[str, str]:
        """What is added to a role's environment."""
        return {VISIBLE: self.roles[name]} if name in self.roles else {}

    def of_engine(self, number: int) -> dict[str, str]:
        """What is added to an engine's environment.

        Args:
            number: of the engine, from 0.
        """
        return {VISIBLE: self.engines[number % len(self.engines)]} if self.engines else {}


NONE = Devices({})
"""A machine without a GPU."""


def allot(config: RunConfig, gpus: Sequence[str]) -> Devices:
    """Divide the GPUs of this machine as `config.devices` says, or as suits the run where it says nothing.

    Args:
        config: of the run.
        gpus: of this machine, by name.

    Raises:
        ConfigError: there are too few, `config.devices` names one that is not there, or a setting needs one.
    """
    given, ranks = config.devices, config.layout.ranks
    for name in ("trainer", "engines", "reference"):
        strangers = [number for number in getattr(given, name) if number >= len(gpus)]
        if strangers:
            raise ConfigError(f"devices.{name} names GPU {strangers[0]}, and this program sees {_count(gpus)}")
    if not gpus:
        _refuse_gpu_settings(config)
        return NONE
    trainer = list(given.trainer or range(ranks))
    if len(trainer) != ranks and given.trainer:
        raise ConfigError(
            f"devices.trainer = {trainer} with layout {config.layout}: it has {ranks} processes, one GPU for each"
        )
    if ranks > len(gpus):
        raise ConfigError(
            f"layout {config.layout} has {ranks} trainer processes, each with a GPU of its own, and this program sees "
            f"{_count(gpus)}; make the layout smaller, or use more machines (runtime='ray')"
        )
    left = [number for number in range(len(gpus)) if number not in trainer and number not in given.reference]
    pool = list(given.engines) or (left if left and config.mode == "async" else list(range(len(gpus))))
    size = engine_size(config.engine_flags)
    if size > len(pool):
        raise ConfigError(
            f"engine_flags {list(config.engine_flags)} divide an engine over {size} GPUs, and {len(pool)} of {_count(gpus)} "
            "are for engines; give it fewer, or choose them with devices.engines"
        )
    engines = [pool[i : i + size] for i in range(0, len(pool) - size + 1, size)]
    spare = [number for group in engines[config.engines :] for number in group if number not in trainer]
    reference = given.reference or tuple(spare[-1:]) or tuple(trainer[-1:])
    roles = {rank_name("policy", rank): gpus[number] for rank, number in enumerate(trainer)}
    return Devices(
        roles | {"reference": gpus[reference[0]]}, tuple(",".join(gpus[number] for number in group) for group in engines)
    )


@dataclass(frozen=True)
class Shares:
    """GPUs that Ray is asked for, for one actor each; below 1 where actors share one."""

    trainer: float = 0.0
    """Each process of the layout."""
    engine: float = 0.0
    reference: float = 0.0


def shares(config: RunConfig, gpus: int, reference: bool) -> Shares:
    """Divide the GPUs of a Ray cluster, which chooses which they are.

    Args:
        config: of the run.
        gpus: of the whole cluster; those that other jobs use count.
        reference: the run has a reference in a process of its own.

    Raises:
        ConfigError: the cluster has too few, `config.devices` names some, or a setting needs one.
    """
    if config.devices != DevicesConfig():
        raise ConfigError("devices names GPUs of one machine; in a Ray cluster Ray chooses them, so leave it at 'auto'")
    if not gpus:
        _refuse_gpu_settings(config)
        return Shares()
    ranks, size = config.layout.ranks, engine_size(config.engine_flags)
    wanted = ranks + config.engines * size + reference
    if config.mode == "async" and wanted <= gpus:
        return Shares(1.0, float(size), float(reference))
    if ranks == size == 1:  # they share
        part = math.floor(100 * min(1.0, gpus / wanted)) / 100
        return Shares(part, part, part * reference)
    raise ConfigError(
        f"the Ray cluster has {gpus} GPUs, and the run takes {wanted}: {ranks} for layout {config.layout}, {size} for each of "
        f"{config.engines} engines{', 1 for the reference' if reference else ''}; make the layout smaller, have fewer engines, "
        "or add nodes" + ("; mode='colocate' with several GPUs is for one machine" if config.mode == "colocate" else "")
    )


def engine_size(flags: Sequence[str]) -> int:
    """GPUs of one engine by its flags, such as 2 for `--tp 2`; numbers that are none count as 1."""
    size = 1
    for i, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if name in SIZES:
            value = value if equals else (flags[i + 1] if i + 1 < len(flags) else "")
            size *= max(1, int(value)) if value.isdigit() else 1
    return size


def _refuse_gpu_settings(config: RunConfig) -> None:
    """Refuse settings that only a GPU can carry out."""
    attention_way(config.training.attention, on_gpu=False, head_dim=LEAST_HEAD, dtype=config.training.dtype)


def _count(gpus: Sequence[str]) -> str:
    return f"{len(gpus) or 'no'} GPU{'' if len(gpus) == 1 else 's'}"
