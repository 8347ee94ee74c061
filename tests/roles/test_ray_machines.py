"""Ray over several machines: nodes that share a folder, but neither memory nor a SQLite file.

The second machine is a node in a mount namespace of its own, where shared memory is another one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from elastic_run import Heard
from postgres_server import PostgresServer, postgres
from prepared_job import prepared_job

import relax_sdk as relax

ray = pytest.importorskip("ray", reason="the ray runtime is optional: pip install 'relax-gym[server,ray]'")

from ray.cluster_utils import Cluster  # noqa: E402
from relax_server.journal import open_journal  # noqa: E402
from relax_server.roles.ray.actors import interface_of  # noqa: E402
from relax_server.roles.ray.placement import namespace  # noqa: E402
from relax_server.roles.ray.runtime import RayRuntime  # noqa: E402

__all__ = ["postgres"]

pytestmark = pytest.mark.timeout(280)

SMALL = dict(
    rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
    warmup={"steps": 2, "batch_size": 4},
    eval={"every": 0, "limit": 8},
    sampling={"max_new_tokens": 2},
)


def can_unshare() -> bool:
    """Whether a process of ours may have mounts of its own."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True, timeout=10).returncode == 0


@pytest.fixture(scope="module")
def two_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Rooms for three CPUs here and for two there; the folder that only the first one has."""
    if not can_unshare():
        pytest.skip("a machine of one's own within this one takes the right to mount: run as root")
    folder = tmp_path_factory.mktemp("machines")
    ray.shutdown()  # what tests of other modules may have left
    private = folder / "private"
    private.mkdir()
    memory = 100 * 2**20
    cluster = Cluster(
        initialize_head=True, head_node_args=dict(num_cpus=3, object_store_memory=memory, include_dashboard=False)
    )
    start = f"{sys.executable} -m ray.scripts.scripts start --address={cluster.address} --num-cpus=2"
    mounts = f"mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs {private}"
    command = ["unshare", "-m", "sh", "-c", f"{mounts} && exec {start} --object-store-memory={memory} --block"]
    with (folder / "node.log").open("w") as log:
        node = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
    try:
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        wait_for_nodes(2)
        yield private
    finally:
        ray.shutdown()
        node.terminate()
        node.wait(30)
        cluster.shutdown()


def wait_for_nodes(count: int) -> None:
    end = time.monotonic() + 90
    while sum(node["Alive"] for node in ray.nodes()) < count:
        assert time.monotonic() < end, "the node did not join"
        time.sleep(0.2)


def test_weights_go_through_the_run_folder_and_groups_through_postgresql(two_machines, tmp_path, postgres: PostgresServer):
    journal = postgres.make()
    run = relax.Trainer("tone-v0", folder=tmp_path / "run", runtime=RayRuntime(), ray={"journal": journal}, **SMALL).fit(
        steps=3, progress=False
    )
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    with contextlib.closing(open_journal(journal)) as opened:
        assert opened.counts("run").acked == 12
    address = ray.util.get_node_ip_address()  # the engine had no room but on the other machine
    assert f"ready at http://{address}:" in (tmp_path / "run" / "logs" / "engine-e1.log").read_text()
    assert not (tmp_path / "run" / "exchange").exists() and not (tmp_path / "run" / "journal.db").exists()


@pytest.mark.nightly
def test_ranks_of_a_layout_work_together_over_machines(two_machines, tmp_path, postgres: PostgresServer):
    """The run takes all five CPUs, so that its two trainer processes are not on one machine."""
    nodes, interfaces = set[str](), set[str | None]()

    class Looks(Heard):
        def step(self, metrics: dict[str, Any]) -> None:
            super().step(metrics)
            for role in ("policy", "policy-1") if metrics["step"] == 1 else ():
                actor = ray.get_actor(role, namespace(tmp_path / "run"))
                asked = actor.__ray_call__.remote(
                    lambda self: (ray.get_runtime_context().get_node_id(), os.environ.get("GLOO_SOCKET_IFNAME"))
                )
                node, interface = ray.get(asked, timeout=30)
                nodes.add(node)
                interfaces.add(interface)

    trainer = relax.Trainer(
        "tone-v0",
        folder=tmp_path / "run",
        runtime=RayRuntime(),
        ray={"journal": postgres.make()},
        layout={"dp": 2},
        **SMALL,
    )
    job = prepared_job(trainer, 3)
    RayRuntime().fit(job, Looks())
    run = relax.Run(job.folder, job.config, job)
    assert [row["step"] for row in run.metrics] == [1, 2, 3]
    assert len(nodes) == 2 and interfaces == {interface_of(ray.util.get_node_ip_address())}
    assert None not in interfaces


def test_what_several_machines_lack_is_said_before_a_run(two_machines, tmp_path):
    with pytest.raises(relax.ConfigError, match=r"SQLite file, which serves one(?s:.)*ray.journal=postgresql://"):
        relax.Trainer("tone-v0", folder=tmp_path / "run", runtime=RayRuntime(), **SMALL).fit(steps=1, progress=False)
    with pytest.raises(relax.ConfigError, match=r"private/run is not visible from(?s:.)*mount at the same path"):
        relax.Trainer("tone-v0", folder=two_machines / "run", runtime=RayRuntime(), **SMALL).fit(steps=1, progress=False)
