"""Configuration of which GPUs each part of a run computes on."""

from __future__ import annotations

from dataclasses import dataclass

from relax_sdk.errors import ConfigError
from relax_sdk.field_checks import check_types, require


@dataclass(frozen=True)
class DevicesConfig:
    """GPUs of the machine by their numbers, from 0, among those that the program sees (`CUDA_VISIBLE_DEVICES`).

    A part without numbers gets its GPUs by itself (`devices="auto"`): the trainer the first, one for each process of its
    layout; engines those that are left, or all of them where none is left or where they take turns with the trainer
    (`mode="colocate"`). A machine without a GPU needs none. In a Ray cluster, Ray chooses.
    """

    trainer: tuple[int, ...] = ()
    """One for each process of `layout`."""
    engines: tuple[int, ...] = ()
    """Dealt to the engines one after the other; an engine that is divided itself (`--tp 2`) gets as many in a row."""
    reference: tuple[int, ...] = ()
    """One, for the reference of `kl_coef` where it is a process of its own (`bus="transfer_queue"`)."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("trainer", "engines", "reference"):
            numbers = getattr(self, name)
            require(all(number >= 0 for number in numbers), self, name, "numbers of GPUs, from 0")
            if len(set(numbers)) < len(numbers):
                raise ConfigError(f"devices.{name} = {list(numbers)} names a GPU twice; allowed: each once")
        require(len(self.reference) <= 1, self, "reference", "one number, or none")
