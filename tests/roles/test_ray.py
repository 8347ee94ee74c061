"""Runs on Ray: real clusters of one node and of three, at the smallest sizes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import psutil
import pytest
from prepared_job import prepared_job
from typer.testing import CliRunner

import relax_sdk as relax
from relax_sdk.cli import app
from relax_sdk.control import RunControl

ray = pytest.importorskip("ray", reason="the ray runtime is optional: pip install 'relax-gym[server,ray]'")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.exceptions import ActorUnavailableError  # noqa: E402
from ray.util.placement_group import placement_group, remove_placement_group  # noqa: E402
from relax_server.journal import open_journal  # noqa: E402
from relax_server.roles.channel import pack  # noqa: E402
from relax_server.roles.layout import RunLayout  # noqa: E402
from relax_server.roles.messages import Stop  # noqa: E402
from relax_server.roles.ray.cluster import look  # noqa: E402
from relax_server.roles.ray.placement import RayPlacement, namespace  # noqa: E402
from relax_server.roles.ray.runtime import RayRuntime  # noqa: E402

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
DECLARED = EntryPoint("ray", PROJECT["entry-points"]["relax.runtimes"]["ray"], "relax.runtimes")
"""How the runtime is found by its name, also where the package was installed before it had this one."""

pytestmark = pytest.mark.timeout(280)

SOON = {"health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}
"""Ray gives a node up sooner than after a minute."""

SMALL = dict(
    rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
    warmup={"steps": 2, "batch_size": 4},
    eval={"every": 2, "limit": 8},
    training={"checkpoint_every": 2},
    sampling={"max_new_tokens": 2},
)


class Letters(relax.Env):
    """Name a letter. It is in no installed package, so its code must travel by value."""

    tasks = staticmethod(lambda: {"train": [{"n": n} for n in range(64)], "eval": [{"n": 0}, {"n": 1}]})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        assert __name__ not in sys.modules, "this module was imported where the episode is played"
        return "say a", {}

    def step(self, action):
        return None, float("a" in action.text.lower()), True, False, {}


class Watch:
    """An observer that acts on what it is told."""

    def __init__(
        self, act: Callable[[int], None] = lambda step: None, stage: Callable[[str], None] = lambda text: None
    ) -> None:
        self.act, self.stage = act, stage
        self.warnings: list[str] = []
        self.steps: list[int] = []

    def warn(self, text: str) -> None:
        if "starts from random weights" not in text:  # `Letters` teaches no form on purpose
            self.warnings.append(text)

    def step(self, metrics: dict) -> None:
        self.steps.append(metrics["step"])
        self.act(metrics["step"])


def fit(folder: Path, steps: int, watch: Watch, env=Letters, **settings) -> relax.Run:
    """`Trainer.fit` with an observer of our own."""
    trainer = relax.Trainer(env, folder=folder, runtime=RayRuntime(), **(SMALL | settings))
    job = prepared_job(trainer, steps)
    RayRuntime().fit(job, watch)
    return relax.Run(job.folder, job.config, job)


def whole(run: relax.Run, steps: int) -> None:
    """Every step was done, no group was lost or trained on twice, and nothing is left behind."""
    assert [row["step"] for row in run.metrics] == list(range(1, steps + 1))
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    assert (counts.acked, counts.leased) == (steps * 4, 0)
    nothing_left(run.folder)


def nothing_left(folder: Path, seconds: float = 60) -> None:
    """What has ended is gone soon."""
    end = time.monotonic() + seconds
    while left := left_behind(folder):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def left_behind(folder: Path) -> list[str]:
    """Processes of a run below this one, actors, and those that wait to remove shared memory."""
    return [c for c in commands() if str(folder) in c or "RoleActor" in c or "relax_server.roles.shared_memory" in c]


def commands() -> dict[str, int]:
    """Command lines of all processes that are alive, and their ids."""
    found = {}
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
            found[" ".join(process.info["cmdline"] or [])] = process.pid
    return found


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


def pid_of(role: str, folder: Path) -> int:
    """The process of a role, or of the engine itself."""
    if role == "engine":
        (engine,) = [pid for c, pid in commands().items() if "engines.embedded" in c and str(folder) in c]
        return engine
    return ask(role, folder, lambda self: os.getpid())


def ask(role: str, folder: Path, question: Callable[[object], Any]) -> Any:
    """Have a function carried out where a role is."""
    actor = ray.get_actor(role, namespace(folder))
    return ray.get(actor.__ray_call__.options(concurrency_group="control").remote(question), timeout=30)


def test_an_address_where_nobody_answers_is_told_at_once(tmp_path):
    with pytest.raises(relax.RunError, match=r"Ray cluster at 127.0.0.1:9 cannot be reached: .*refused"):
        fit(tmp_path / "a", 1, Watch(), ray={"address": "127.0.0.1:9"})
    with pytest.raises(relax.RunError, match="HOST:PORT"):
        fit(tmp_path / "b", 1, Watch(), ray={"address": "ray://somewhere:10001"})


def test_without_ray_one_is_told_what_to_install():
    """In a process of its own, where the package cannot be imported."""
    code = f"""
import sys
sys.modules["ray"] = None
from importlib.metadata import EntryPoint
from relax_sdk import runtime
runtime.entry_points = lambda group: [EntryPoint({DECLARED.name!r}, {DECLARED.value!r}, group)]
runtime.find_runtime("ray")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "RegistryError: runtime 'ray' needs packages" in done.stderr, done.stderr
    assert "pip install 'relax-gym[server,ray]'" in done.stderr


@pytest.fixture(scope="module", autouse=True)
def alone() -> None:
    """Where tests of other modules have left a connection to a cluster, it is not that of a run here."""
    ray.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three raylets; a run needs two of them. The first one is where the program is."""
    node: dict[str, Any] = dict(num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False)
    cluster = Cluster(initialize_head=True, head_node_args=node | {"_system_config": SOON})
    try:
        for _ in range(2):
            cluster.add_node(**node)
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_the_doctor_looks_at_every_node(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("relax_sdk.runtime.entry_points", lambda group: [DECLARED])
    monkeypatch.setattr("relax_sdk.progress.TICK", 0.001)
    said = CliRunner().invoke(app, ["doctor", str(tmp_path), "--runtime", "ray"])
    assert said.exit_code == 0, said.output
    assert "6 CPUs on 3 node(s); a run takes 4" in said.output and f"all nodes see {tmp_path}" in said.output
    assert "examining runtime ray · " in said.output, "it may take minutes"
    said = CliRunner().invoke(app, ["doctor", str(tmp_path), "--runtime", "ray", "--engines", "9"])
    assert said.exit_code == 1 and "a run takes 12" in said.output


def test_a_node_that_does_not_answer_is_named(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("relax_server.roles.ray.cluster.LOOK_SECONDS", 0.0)
    given_up, cancel = [], ray.cancel
    monkeypatch.setattr(ray, "cancel", lambda task, force: given_up.append(task) or cancel(task, force=force))
    seen = look(relax.RunConfig(env=""), tmp_path)
    (room, *silent) = map(str, seen.findings)
    assert "6 CPUs on 3 node(s)" in room and len(silent) == len(given_up) == 3 and not seen.one_machine
    assert all(re.search(r"node [0-9.]+ did not answer within 0 s(?s:.)*try again", text) for text in silent), silent


def test_a_cluster_that_is_busy_is_not_waited_for_without_end(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("relax_server.roles.ray.placement.PLACE_SECONDS", 2.0)
    others = placement_group([{"CPU": 2}, {"CPU": 2}])
    try:
        assert others.wait(60)
        with pytest.raises(relax.RunError, match="no room in the Ray cluster within 2 s: a run takes 4 CPUs"):
            fit(tmp_path / "run", 1, Watch())
    finally:
        remove_placement_group(others)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_groups_go_through_transfer_queue(cluster, tmp_path):
    watch = Watch()
    whole(fit(tmp_path / "run", 4, watch, bus="transfer_queue"), 4)
    assert watch.warnings == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_roles_that_compute_fields_are_started_again_alone(cluster, tmp_path):
    folder, victims = tmp_path / "run", ["advantages", "reference", "policy"]
    killed: dict[str, int] = {}

    def kill(step: int) -> None:
        if step >= 2 * len(killed) + 2 and len(killed) < len(victims):
            role = victims[len(killed)]
            killed[role] = pid_of(role, folder)
            os.kill(killed[role], signal.SIGKILL)

    watch = Watch(kill)
    run = fit(folder, 8, watch, bus="transfer_queue", algorithm={"kl_coef": 0.1})
    assert list(killed) == victims
    for role in victims:
        assert sum(f"the {role} process ended" in warning for warning in watch.warnings) == 1, watch.warnings
    again = [warning for warning in watch.warnings if "starting it again" in warning]
    assert len(again) == 3, again  # the queue ends with the trainer, and the other roles join the next one
    whole(run, 8)
    assert {f.name.rpartition("-")[0] for f in RunLayout(folder).timeline.glob("*.jsonl")} >= {"advantages", "reference"}
    assert run.metrics[-1]["kl"] > 0


async def test_a_run_is_carried_out_once_at_a_time(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("relax_server.roles.ray.role.NAME_SECONDS", 1.0)
    placement = RayPlacement(tmp_path, relax.RunConfig(env=""), one_machine=True)
    first, second = (placement.role("controller", tmp_path, lambda message: None) for _ in range(2))
    try:
        await first.start(Stop())
        with pytest.raises(relax.RunError, match="controller of this run folder is still there"):
            await second.start(Stop())
    finally:
        await first.stop()
        placement.close()


async def test_an_actor_that_is_out_of_reach_does_not_keep_the_name_from_the_next(cluster, tmp_path, monkeypatch):
    asked, known = [], asyncio.Event()

    async def out_of_reach(stream):
        asked.append(stream)
        if len(asked) == 1:
            raise ActorUnavailableError("no answer from its node", None)
        first = await anext(stream)
        known.set()
        return first

    monkeypatch.setattr("relax_server.roles.ray.role.anext", out_of_reach, raising=False)
    monkeypatch.setattr("relax_server.roles.ray.role.NAME_SECONDS", 15.0)
    placement = RayPlacement(tmp_path, relax.RunConfig(env=""), one_machine=True)
    role = placement.role("controller", tmp_path, lambda message: known.set())  # of its end, too
    try:
        await role.start(Stop())
        await asyncio.wait_for(known.wait(), 60)
        assert len(asked) == 2
    finally:
        await role.stop()
        placement.close()


@pytest.mark.nightly
def test_a_run_reports_what_the_local_runtime_does(cluster, tmp_path):
    on_ray = relax.Trainer("tone-v0", folder=tmp_path / "ray", runtime=RayRuntime(), **SMALL).fit(steps=2, progress=False)
    local = relax.Trainer("tone-v0", folder=tmp_path / "local", **SMALL).fit(steps=2, progress=False)
    assert [row.keys() for row in on_ray.metrics] == [row.keys() for row in local.metrics]
    for name in ("config.json", "reward.png", "hf", "checkpoints", "tensorboard", "timeline.json"):
        assert (on_ray.folder / name).exists(), name
    whole(on_ray, 2)


@pytest.mark.nightly
def test_each_role_that_is_killed_is_started_again_alone(cluster, tmp_path):
    folder, victims = tmp_path / "run", ["policy", "rollout", "engine", "controller"]
    killed: dict[str, int] = {}

    def kill(step: int) -> None:
        if step >= 2 * len(killed) + 2 and len(killed) < len(victims):
            role = victims[len(killed)]
            killed[role] = pid_of(role, folder)
            os.kill(killed[role], signal.SIGKILL)

    watch = Watch(kill)
    run = fit(folder, 10, watch)
    assert list(killed) == victims
    for words in ("the policy process ended", "the rollout process ended", "the engine at", "the controller ended"):
        assert sum(words in warning for warning in watch.warnings) == 1, watch.warnings
    whole(run, 10)


@pytest.mark.nightly
def test_each_rank_of_a_layout_that_is_killed_starts_the_trainer_alone_again(cluster, tmp_path):
    folder, left = tmp_path / "run", ["policy-1", "policy"]

    def kill(step: int) -> None:
        if left and step >= 6 - 2 * len(left):
            os.kill(pid_of(left.pop(0), folder), signal.SIGKILL)

    watch = Watch(kill)
    run = fit(folder, 8, watch, layout={"dp": 2})
    assert not left
    ended = [warning for warning in watch.warnings if " process ended" in warning]
    assert len(ended) == 2 and all("the policy process ended" in warning for warning in ended), watch.warnings
    whole(run, 8)


@pytest.mark.nightly
def test_an_engine_is_added_beyond_those_that_room_was_kept_for(cluster, tmp_path):
    folder, seen = tmp_path / "run", []

    def add(step: int) -> None:  # in the program, while the run goes on elsewhere
        if seen:
            return
        with RunControl(folder) as control:
            control.add("second")
            seen.append(control.wait("second", lambda state: state != "starting", 150, time.sleep))
            wait_until(lambda: next(row for row in control.list() if row["id"] == "second")["answered"], 60)
            control.remove("second", 10)
            seen.append(control.wait("second", lambda state: state != "draining", 60, time.sleep))
        ray.get_actor("controller", namespace(folder)).put.remote(pack(Stop()))

    watch = Watch(add)
    with pytest.raises(relax.RunError, match="stopped at step"):
        fit(folder, 100_000, watch, warmup={"steps": 0}, eval={"every": 0})
    assert [row["state"] for row in seen] == ["current", "gone"], seen
    counts = open_journal(RunLayout(folder).journal).counts("run")
    assert counts.leased == 0 and counts.acked % 4 == 0
    nothing_left(folder)


def test_a_controller_that_ends_too_often_ends_the_run(cluster, tmp_path, monkeypatch):
    def kill(text: str) -> None:
        if "trainer" in text:  # its first words
            os.kill(pid_of("controller", tmp_path / "run"), signal.SIGKILL)

    monkeypatch.setattr("relax_server.roles.restarts.MAX_RESTARTS", 0)
    with pytest.raises(relax.RunError, match=r"controller ended 1 times(?s:.)*relax train --resume \S+ --runtime ray"):
        fit(tmp_path / "run", 100, Watch(stage=kill))
    nothing_left(tmp_path / "run")


def test_a_cluster_without_room_is_refused_and_named(cluster, tmp_path):
    with pytest.raises(relax.ConfigError, match=r"takes 12 \(controller 1, rollout 1, policy 1, engines 9\)(?s:.)*add nodes"):
        fit(tmp_path / "run", 1, Watch(), engines=9)


@pytest.mark.nightly
def test_a_node_that_dies_takes_no_run_along(cluster, tmp_path):
    lost: list[str] = []

    def lose(step: int) -> None:
        if step == 2 and not lost:
            for role in ("policy", "rollout", "controller"):
                node = ask(role, tmp_path / "run", lambda self: ray.get_runtime_context().get_node_id())
                victims = [worker for worker in cluster.worker_nodes if worker.node_id == node]
                if victims:  # not the one where the program is
                    lost.append(role)
                    cluster.remove_node(victims[0], allow_graceful=False)
                    return

    watch = Watch(lose)
    run = fit(tmp_path / "run", 8, watch)  # more than what has been played when the node dies
    assert lost and any("ended" in warning for warning in watch.warnings), watch.warnings
    whole(run, 8)


SCRIPT = """
import signal, sys
import relax_sdk as relax
from relax_server.roles.ray.runtime import RayRuntime
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell begin with it ignored
folder, resume = sys.argv[1], len(sys.argv) > 2
trainer = relax.Trainer("tone-v0", folder=folder, runtime=RayRuntime(), **SMALL)
trainer.fit(steps=100000, resume=resume)
"""


@contextlib.contextmanager
def script(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program of its own, with a cluster of its own, whose terminal's signals it shares with all that it starts."""
    command = [sys.executable, "-c", SCRIPT.replace("SMALL", repr(SMALL)), *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:  # the test has failed
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ctrl_c_can_be_resumed_and_a_program_that_is_killed_leaves_nothing(tmp_path):
    folder = tmp_path / "run"
    layout = RunLayout(folder)
    with script(str(folder)) as process:
        wait_until(lambda: layout.checkpoints()[1:], 240)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        said = process.communicate(timeout=60)[1]
    assert process.returncode != 0 and "stopping after the step in progress" in said and "--runtime ray" in said, said
    wait_until(lambda: not [p for p in family if p.is_running()], 20)
    done = [row["step"] for row in relax.Run.load(folder).metrics]
    with script(str(folder), "resume") as process:
        wait_until(lambda: len(relax.Run.load(folder).metrics) > len(done), 240)
        family = psutil.Process(process.pid).children(recursive=True)
        agents = [p for p in family if p.name().endswith("Agent")]  # of Ray itself: they try for a minute to report their end
        process.kill()
        process.communicate(timeout=60)
    wait_until(lambda: not [p for p in family if p.is_running() and p not in agents], 20)
    assert [row["step"] for row in relax.Run.load(folder).metrics][: len(done) + 1] == [*done, done[-1] + 1]
    wait_until(
        lambda: not [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])], 20
    )
    owners = {p.pid for p in family}
    wait_until(lambda: not [p for p in Path("/dev/shm").glob("relax-*") if int(p.name.split("-")[1]) in owners], 20)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_sigterm_to_the_program_alone_ends_a_run_with_a_checkpoint(tmp_path):
    folder = tmp_path / "run"
    with script(str(folder)) as process:  # Ray takes SIGTERM for itself in whoever connects to it, and would leave at once
        wait_until(lambda: RunLayout(folder).checkpoints()[1:], 240)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    assert "stopping after the step in progress" in said and "stopped at step" in said, said
    last = relax.Run.load(folder).metrics[-1]["step"]
    assert RunLayout(folder).checkpoints()[-1].name == f"step_{last:06d}"
