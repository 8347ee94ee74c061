"""Configuration of how the trainer's model and its batches are divided over several processes."""

from __future__ import annotations

from dataclasses import dataclass

from relax_sdk.field_checks import check_types, require

NUMBERS = ("tp", "pp", "vpp", "cp", "ep", "dp")
"""Fields that say how many share something."""


@dataclass(frozen=True)
class LayoutConfig:
    """How many trainer processes share what; each process has one device.

    There are `tp * pp * cp * dp` processes. `Trainer(env, layout={"tp": 2})` divides every layer over two.
    """

    tp: int = 1
    """Tensor parallelism: heads, channels, vocabulary and, without `ep`, the channels of experts are divided."""
    pp: int = 1
    """Pipeline parallelism: consecutive layers are divided; the towers of media are on the first stage."""
    vpp: int = 1
    """Interleaved pipeline (virtual pipeline parallelism, arXiv 2104.04473): into how many parts each stage is divided.

    They lie `pp` parts apart, so that stages wait less for each other and send more messages. Needs `pp` above 1."""
    cp: int = 1
    """Context parallelism: the tokens of a forest are divided."""
    ep: int = 1
    """Expert parallelism: experts are divided over `tp * cp * dp` processes, which this number must divide."""
    dp: int = 1
    """Data parallelism: each has its own part of the batch."""
    sp: bool = True
    """Sequence parallelism: with `tp` above 1, norms and residuals hold a part of the tokens each. A mixture of experts needs
    it."""
    distributed_optimizer: bool = False
    """Masters and moments of the optimizer are divided over the processes of `dp`."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in NUMBERS:
            require(getattr(self, name) >= 1, self, name, "1 or more")
        require(self.vpp == 1 or self.pp > 1, self, "vpp", "1 where pp is 1: there is no pipeline to interleave")
        shared = self.tp * self.cp * self.dp
        require(
            shared % self.ep == 0, self, "ep", f"a divisor of tp * cp * dp = {shared}, over whose processes experts are divided"
        )

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def etp(self) -> int:
        """Processes that the channels of an expert are divided over: those of `tp`, or one where experts themselves are
        divided (`ep`)."""
        return self.tp if self.ep == 1 else 1

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and residuals hold a part of the tokens each."""
        return self.sp and self.tp > 1

    def __str__(self) -> str:
        """The numbers above 1, such as `tp=2 dp=2`; `one process` if there are none."""
        parts = [f"{name}={getattr(self, name)}" for name in NUMBERS if getattr(self, name) > 1]
        if self.tp > 1 and not self.sp:
            parts.append("sp=False")
        if self.distributed_optimizer:
            parts.append("distributed_optimizer=True")
        return " ".join(parts) or "one process"
