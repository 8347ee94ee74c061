"""A rank of the policy: how it is made, and what one that does not lead does."""

from __future__ import annotations

import os
import threading
import time

from relax_sdk.media import MediaRef, MediaStore
from relax_server.roles.channel import Outlet
from relax_server.roles.field_worker import REFERENCE_ROLE, field_roles
from relax_server.roles.layout import RunLayout
from relax_server.roles.messages import Beat, StartPolicy
from relax_server.timeline import Timeline
from relax_server.training.megatron import parallel
from relax_server.training.policy import PolicyModel
from relax_server.training.ranks import follow, rendezvous

BEAT_SECONDS = 1.0


def join_ranks(first: StartPolicy) -> None:
    """Meet the other ranks of the layout; they are waited for.

    Raises:
        TrainingError: they did not come.
    """
    layout = first.config.layout
    if layout.ranks > 1 and first.one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = rendezvous(first.meeting, layout.ranks) if first.meeting is not None else None
    seconds = max(parallel.TIMEOUT, first.config.training.step_timeout)
    parallel.initialize(seed=first.config.seed, layout=layout, rank=first.rank, store=store, timeout=seconds)


def make_policy(first: StartPolicy) -> PolicyModel:
    """This rank's part of the policy."""
    config = first.config
    return PolicyModel(
        first.model_path,
        algorithm=config.algorithm,
        optimizer=config.optimizer,
        training=config.training,
        total_steps=config.steps,
        sampling=config.sampling,
        seed=config.seed,
        features=first.features,
        own_reference=REFERENCE_ROLE not in field_roles(config),
        tuning=config.tuning,
        publish_adapters=config.publishes_adapters,
        takes_turns=config.mode == "colocate",
    )


def run_rank(channel: Outlet, first: StartPolicy) -> None:
    """Do what rank 0 has done on every rank, until it ends; a beat says meanwhile that this process is not frozen."""
    threading.Thread(target=_beat, args=(channel,), name="beat", daemon=True).start()
    layout = RunLayout(first.folder)
    policy, store, timeline = make_policy(first), MediaStore(layout.media), Timeline(layout.timeline, f"policy-{first.rank}")

    def media(ref: MediaRef) -> bytes:
        return store.get(ref)

    def done(name: str) -> None:
        if name == "train_step":
            for stage, start, end in policy.spans:
                timeline.add(stage, start, end, step=policy.step)

    try:
        follow(policy, media, done)
    finally:
        timeline.close()


def _beat(channel: Outlet) -> None:
    """Tell the controller once a second that this process runs, as long as somebody listens."""
    while True:
        try:
            channel.send(Beat(waiting=True))
        except OSError:
            return
        time.sleep(BEAT_SECONDS)
