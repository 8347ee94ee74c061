"""The Ray cluster of a run: one that is there, or one of its own on this machine; and a look at its nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from relax_sdk.config import RunConfig
from relax_sdk.doctor import requirements
from relax_sdk.errors import ConfigError, RunError
from relax_sdk.findings import Finding
from relax_server.bus.cluster import start_cluster
from relax_server.roles import shared_memory
from relax_server.roles.ray.placement import listed, needs
from relax_server.roles.ray.role import reason

CONNECT_SECONDS = 10.0
"""Seconds for a cluster to answer at all."""

LOOK_SECONDS = 180.0
"""Seconds for every node to answer; each starts a process for it, which takes more than a minute where it is busy."""


@contextlib.contextmanager
def connected(config: RunConfig) -> Iterator[None]:
    """A connection to a run's cluster, for as long as the block lasts; where this process has one already, that one.

    Raises:
        RunError: the cluster cannot be reached or started.
    """
    if ray.is_initialized():
        yield
        return
    address, on_sigterm = address_of(config), signal.getsignal(signal.SIGTERM)
    common: dict[str, Any] = dict(log_to_driver=False, logging_level="ERROR", runtime_env=config.ray.runtime_env or None)
    try:
        if address:
            _answers(address)
            ray.init(address, **common)
        else:
            cpus = sum(needs(config).values())
            memory = config.ray.object_store_mb * 2**20
            start_cluster(num_cpus=cpus, object_store_memory=memory, **common)
    except Exception as error:  # Ray raises a plain one where a node does not come up in time
        what = str(error).strip().partition("\n")[0]
        if not address:
            raise RunError(f"no Ray cluster could be started here: {what}") from error
        advice = "is it running, and is RAY_AUTH_TOKEN the one that it was started with?"
        raise RunError(f"the Ray cluster at {address} cannot be reached: {what}; {advice}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray would leave at once, without a checkpoint
    try:
        yield
    finally:
        ray.shutdown()


def address_of(config: RunConfig) -> str | None:
    """Address of the cluster that a run is to use; None: one of its own."""
    given = config.ray.address or os.environ.get("RAY_ADDRESS")
    return None if given == "local" else given


def _answers(address: str) -> None:
    """Ask first, since Ray goes on asking for minutes.

    Raises:
        OSError: nobody answers there.
        ValueError: not an address that a run can use.
    """
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if "://" in address or not (colon and port.isdigit()):
        raise ValueError("write it as HOST:PORT, as `ray start` shows it, and call it from a machine of the cluster")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


# ------------------------------------------------------------------------------------------------------------ the nodes


@dataclass(frozen=True)
class NodeLook:
    """What one node has and sees."""

    address: str
    versions: dict[str, str]
    sees_folder: bool
    sees_memory: bool
    """The shared memory of the machine where the run was started."""


@dataclass(frozen=True)
class ClusterLook:
    """What can be said of a cluster before a run."""

    findings: list[Finding]
    one_machine: bool
    """All nodes share the memory of this machine."""

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.level == "problem"]


def look(config: RunConfig, folder: Path) -> ClusterLook:
    """Look at the cluster that this process is connected to: room, packages, and what its nodes share.

    Args:
        config: of the run that is to be carried out.
        folder: of the run, or where runs will be kept.

    Raises:
        ConfigError: there is no such folder here, or it cannot be written.
    """
    folder = folder.resolve()
    nodes = [node for node in ray.nodes() if node["Alive"]]
    findings = _room(config, nodes)
    with _marker(folder) as in_folder, _marker(shared_memory.root()) as in_memory:
        task = ray.remote(num_cpus=0, max_retries=0)(look_at_node)
        asked, names = {}, sorted(requirements("server", "ray"))
        for node in nodes:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked[task.options(scheduling_strategy=here).remote(in_folder, in_memory, names)] = node["NodeManagerAddress"]
        ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_SECONDS)
        looks: list[NodeLook] = []
        for answer, address in asked.items():
            try:
                looks.append(ray.get(answer, timeout=0))
            except RayError as error:
                findings.append(_silent(address, error))
                ray.cancel(answer, force=True)  # or it is carried out all the same, beside the next look
    one_machine = len(looks) == len(asked) and all(node.sees_memory for node in looks)
    who = "all nodes" if len(looks) == len(asked) else f"{len(looks)} of {len(asked)} nodes"
    if looks:
        findings += _shared(looks, who, folder) + _same(looks, who, versions_of(names))
    if not all(node.sees_memory for node in looks) and config.ray.journal is None:
        findings.append(
            Finding(
                "problem",
                "the nodes are on several machines, but the journal is a SQLite file, which serves one",
                "name a PostgreSQL database: ray.journal=postgresql://user@host/database",
            )
        )
    return ClusterLook(findings, one_machine)


def look_at_node(in_folder: Path, in_memory: Path, names: Sequence[str]) -> NodeLook:
    """Carried out on every node."""
    return NodeLook(ray.util.get_node_ip_address(), versions_of(names), in_folder.exists(), in_memory.exists())


def versions_of(names: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


@contextlib.contextmanager
def _marker(folder: Path) -> Iterator[Path]:
    """A file that only those see who share the folder."""
    path = folder / f".relax-{uuid.uuid4().hex}"
    try:
        path.touch()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}); name the folder where runs are kept") from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _room(config: RunConfig, nodes: list[dict[str, Any]]) -> list[Finding]:
    cpus = [node["Resources"].get("CPU", 0.0) for node in nodes]
    wanted = needs(config)
    total = sum(wanted.values())
    what = f"{sum(cpus):g} CPUs on {len(nodes)} node(s); a run takes {total} ({listed(wanted)})"
    if total > sum(cpus):
        return [Finding("problem", what, "add nodes, or start Ray with a larger --num-cpus: a CPU here is only a place")]
    if wanted["policy"] > max(cpus):
        return [Finding("problem", f"no node has {wanted['policy']} CPUs for the policy", "take fewer training.threads")]
    return [Finding("ok", what)]


def _silent(address: str, error: RayError) -> Finding:
    if isinstance(error, GetTimeoutError):
        what = f"node {address} did not answer within {LOOK_SECONDS:g} s"
        return Finding("problem", what, "look at it with `ray status`, and try again: it is very busy, or out of reach")
    cause = getattr(error, "cause", None)
    if isinstance(cause, ImportError):
        what = f"node {address} lacks a package ({cause})"
    else:
        what = f"node {address} did not answer ({reason(error)})"
    return Finding("problem", what, "install the same packages on all nodes: pip install 'relax-gym[server,ray]'")


def _shared(looks: list[NodeLook], who: str, folder: Path) -> list[Finding]:
    blind = sorted({node.address for node in looks if not node.sees_folder})
    if blind:
        advice = "keep runs on a file system that all nodes mount at the same path: folder=…"
        return [Finding("problem", f"{folder} is not visible from {', '.join(blind)}", advice)]
    return [Finding("ok", f"{who} see {folder}")]


def _same(looks: list[NodeLook], who: str, mine: dict[str, str]) -> list[Finding]:
    """Packages that differ from those of this machine."""
    differing = []
    for node in looks:
        wrong = {name for name in mine.keys() | node.versions.keys() if mine.get(name) != node.versions.get(name)}
        texts = [f"{name} {node.versions.get(name, 'missing')} (here {mine.get(name, 'missing')})" for name in sorted(wrong)]
        if texts:
            differing.append(f"{node.address}: {', '.join(texts)}")
    if differing:
        return [Finding("problem", "; ".join(differing), "install the same versions on all nodes")]
    return [Finding("ok", f"{len(mine)} packages are the same on {who}")]
