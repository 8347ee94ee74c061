"""The policy on several ranks: rank 0 leads, and each call of it is made on every rank with the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_sdk.errors import RelaxError
from relax_server.training.batch import ReadMedia
from relax_server.training.megatron import parallel
from relax_server.training.policy import PolicyModel

Call = Callable[..., Any]

CALLS: dict[str, Call] = {
    "warmup_step": lambda policy, media, samples, lr: policy.warmup_step(samples, media, lr),
    "end_warmup": lambda policy, media: policy.end_warmup(),
    "train_step": lambda policy, media, groups, version, given: policy.train_step(groups, media, version, given),
    "attempt": lambda policy, media, group, version, given: policy.attempt(group, media, version, given),
    "load_reference": lambda policy, media, folder: policy.load_reference(folder),
    "export_weights": lambda policy, media, folder: policy.export_weights(folder),
    "export": lambda policy, media, folder: policy.export(folder),
    "park": lambda policy, media: policy.park(),
    "unpark": lambda policy, media: policy.unpark(),
    "begin_save": lambda policy, media, folder, meta, waits: policy.begin_save(folder, meta, waits),
    "finish_save": lambda policy, media: policy.finish_save(),
    "load": lambda policy, media, folder: policy.load(folder),
}
"""What rank 0 may have done: methods of `PolicyModel`, where each rank reads media by itself."""

END = "end"


class AllRanks:
    """Rank 0's hand on every rank of the policy; with one rank it calls that one.

    Args:
        policy: of rank 0.
        media: reads the bytes of a media item there.
    """

    def __init__(self, policy: PolicyModel, media: ReadMedia) -> None:
        self._policy, self._media = policy, media

    def call(self, name: str, *args: Any) -> Any:
        """Make one of `CALLS` on every rank.

        Returns:
            What it returned on rank 0.

        Raises:
            RelaxError: as the method of `PolicyModel`. Where every rank has raised it, another call may follow.
        """
        parallel.from_lead((name, args))
        return CALLS[name](self._policy, self._media, *args)

    def end(self) -> None:
        """Let the other ranks end well."""
        parallel.from_lead((END, ()))


def follow(policy: PolicyModel, media: ReadMedia, done: Callable[[str], None]) -> None:
    """Do what rank 0 has done on every rank, until it ends.

    Args:
        policy: of this rank.
        media: reads the bytes of a media item here.
        done: told the name of each call that was made.

    Raises:
        RelaxError: an error of this rank that the others do not have, so that it cannot go on with them.
    """
    while True:
        name, args = parallel.from_lead(None)
        if name == END:
            return
        try:
            CALLS[name](policy, media, *args)
        except RelaxError as error:
            if not parallel.is_shared(error):
                raise
        done(name)


def rendezvous(folder: Path, ranks: int) -> Any:
    """Where ranks find each other: a file in a folder that all of them see, and nobody else.

    Args:
        folder: private to the run.
        ranks: how many there are.
    """
    import torch.distributed as dist

    stores: Any = dist
    return stores.FileStore(str(folder), ranks)
