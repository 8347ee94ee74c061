"""SIGKILL of every process of a run at random moments: how long until it trains again, and is anything lost or trained twice?

    python -m benchmarks.chaos [--times 20] [--roles nothing engine policy rollout controller network] [--env tone-v0]
    python -m benchmarks.chaos --runtime ray --bus transfer_queue [--roles engine … node … reference … storage] [--together]
    python -m benchmarks.chaos --case routes --roles policy --times 10

Every run goes on to step 150 at least and is then stopped; *held-out* is what its last weights get on 256 held-out tasks, the
lowest and the mean of the runs. The row *nothing* is of as many runs in which nothing is killed. Each role has runs of its own;
with `--together` they are killed in the same runs, in random order, and what a row says of groups and of the held-out reward is
of all these runs.

*Network* is the line between the run and its only engine, which runs elsewhere: connections break, or nothing comes through, in
turns, for five seconds; the time counts from when it is mended.

With `--runtime ray` the controller is an actor, which the program starts again; the *program* is what the user started, and is
resumed by hand, as the controller is where there is no Ray. A *node* is one of three raylets of this machine, killed with all
that runs below it; Ray is set to give a node up after five seconds. With `--bus transfer_queue` the *advantages* and the
*reference* are roles of their own, and *queue* and *storage* are TransferQueue's own actors.

The case *routes* replays the engine's routes in the trainer (R3), beside a KL reference and after a format warm-up, so that a
trainer that begins again has to have all three again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import psutil
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout
from relax_server.roles.restarts import MAX_RESTARTS

import relax_sdk as relax
from benchmarks.report import save
from benchmarks.tcp_line import FarEngine
from relax_sdk.control import RunControl

ROLES = {"engine": "engines.embedded"} | {
    role: f"roles.child {role}" for role in ("policy", "rollout", "advantages", "reference")
}
"""What is in the command line of each on this machine's runtime."""
ON_QUEUE = ("advantages", "reference")
"""There only with TransferQueue."""
ACTORS = {"queue": "ray::Controller", "storage": "ray::SimpleStorageUnit"}
"""TransferQueue's, by the names that Ray gives their processes."""
NODE, NETWORK = "node", "network"
EVERYWHERE = ("engine", "policy", "rollout", "controller", NETWORK)
ON_RAY = (*EVERYWHERE, "program", NODE)
BY_HAND = {"local": "controller", "ray": "program"}
"""What nothing starts again: the process that the user has started."""
KILLS_A_RUN = MAX_RESTARTS - 1
NOTHING = "nothing"
ALONE = (NOTHING, NODE, NETWORK, "program")
"""In runs of their own: with a cluster or an engine elsewhere, or another one who starts it again."""
GROUPS, LIMIT = 8, 180.0
"""Groups a step; seconds to wait for anything."""
CASES = {
    "plain": (),
    "routes": ("training.replay_routes=true", "algorithm.kl_coef=0.03", "warmup.steps=60"),
}
"""Settings of a run beside those that all have."""
CUT = 5.0
"""Seconds that the network is away."""
AHEAD = {"engine": 3, "rollout": 3}
"""Steps that may still come from before a kill: the one under way, and the two batches played ahead with a staleness of 1."""
STEPS, TASKS = 150, 256
"""Steps of a run, at least, and tasks of its evaluation."""


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run, as far as they are written."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def steps_done(folder: Path) -> int:
    """The last step that the metrics of a run know of."""
    return max((row["step"] for row in rows(folder)), default=0)


class Nodes:
    """A Ray cluster of three raylets. The first one is where the program is; a run fits on two."""

    SOON: ClassVar = {"health_check_period_ms": 1000, "health_check_timeout_ms": 5000, "health_check_failure_threshold": 3}
    EACH: ClassVar[dict[str, Any]] = dict(num_cpus=2, object_store_memory=100 * 2**20, include_dashboard=False)

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args=self.EACH | {"_system_config": self.SOON})
        for _ in range(2):
            self._cluster.add_node(**self.EACH)
        self.address = self._cluster.address

    def kill(self, processes: Iterable[psutil.Process]) -> None:
        """Kill a node below which one of these processes runs, but not the first; another one comes in its place."""
        above = {parent.pid for process in processes for parent in process.parents()}
        victim = next(node for node in self._cluster.worker_nodes if _raylet(node) in above)
        self._cluster.remove_node(victim, allow_graceful=False)
        self._cluster.add_node(**self.EACH)

    def close(self) -> None:
        self._cluster.shutdown()


def _raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


def _is_there(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


class Run:
    """`relax train` in a process of its own, watched through its folder."""

    def __init__(
        self,
        env: str,
        folder: Path,
        steps: int,
        seed: int,
        runtime: str,
        bus: str,
        nodes: Nodes | None = None,
        case: str = "plain",
    ) -> None:
        self.folder, self.steps, self.runtime, self.nodes = folder, steps, runtime, nodes
        settings = [f"rollout.groups_per_step={GROUPS}", "rollout.group_size=8", "training.checkpoint_every=5", "eval.every=0"]
        settings += CASES[case]
        settings += [f"ray.address={nodes.address}"] if nodes is not None else []
        sets = [part for setting in settings for part in ("--set", setting)]
        self.more = ["--runtime", runtime]
        self.far: FarEngine | None = None
        self.cuts = 0
        first = ["train", env, "--folder", str(folder), "--steps", str(steps), "--seed", str(seed), "--bus", bus]
        first += [*sets, *self.more]
        self.process = self.start(first)

    @property
    def log(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"

    def start(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        def heed_interrupt() -> None:  # background jobs of a shell begin with it ignored
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        command = [sys.executable, "-m", "relax_sdk.cli", *arguments]
        with self.log.open("ab") as log:
            return subprocess.Popen(command, stderr=log, stdout=log, preexec_fn=heed_interrupt)

    def wait_for_step(self, step: int) -> None:
        """Wait until so many steps are done; see `wait_for_rows`."""
        self.wait_for_rows(step, lambda row: True)

    def wait_for_rows(self, n: int, counts: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the metrics have so many rows that count; see `wait`."""
        self.wait(lambda: sum(map(counts, rows(self.folder))) >= n, f"{n} steps")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something to become true while the run goes on.

        Raises:
            RuntimeError: the run has ended.
            TimeoutError: it takes too long.
        """
        end = time.monotonic() + LIMIT
        while not condition():
            if self.process.poll() is not None:
                raise RuntimeError(f"the run has ended: {self.log.read_text()[-2000:]}")
            if time.monotonic() > end:
                raise TimeoutError(f"{self.folder}: not {what} within {LIMIT:.0f} s; see its logs")
            time.sleep(0.05)

    def process_of(self, role: str, other_than: int = 0) -> psutil.Process:
        """The process of a role, waiting for one that is just being started."""
        end = time.monotonic() + LIMIT
        while time.monotonic() < end and self.process.poll() is None:
            for process in self.candidates(role):
                if process.pid != other_than:
                    return process
            time.sleep(0.01)
        raise TimeoutError(f"{self.folder}: no process of the {role} within {LIMIT:.0f} s; see its logs")

    def candidates(self, role: str) -> Iterator[psutil.Process]:
        """Processes that are this role's."""
        everywhere = self.runtime == "ray" or role in ACTORS
        for process in psutil.process_iter() if everywhere else psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error, OSError):  # one that has ended has no command line
                command = " ".join(process.cmdline())
                if role in ACTORS:
                    mine = command.startswith(ACTORS[role])
                elif not everywhere:
                    mine = ROLES[role] in command
                elif role == "engine":
                    mine = ROLES[role] in command and str(self.folder) in command
                else:  # an actor's output goes to the log of its role
                    mine = os.readlink(f"/proc/{process.pid}/fd/1") == str(self.folder / "logs" / f"{role}.log")
                if mine:
                    yield process

    def kill(self, role: str) -> float:
        """Kill one process; returns the seconds until there is another one and it trains again."""
        if role == BY_HAND[self.runtime]:
            old = list(self.candidates("policy"))
            self.process.kill()
            self.process.wait()
            killed = time.monotonic()
            self.process = self.start(["train", "--resume", str(self.folder), *self.more])
            self.wait(lambda: not any(map(_is_there, old)), "without the trainer of before")
            at = time.time()
            self.wait_for_rows(1, lambda row: row["time"] > at)
        elif self.nodes is not None:
            mine = [process for each in ("engine", "policy", "rollout", "controller") for process in self.candidates(each)]
            killed, at = time.monotonic(), time.time()
            self.nodes.kill(mine)
            self.wait_for_rows(max(AHEAD.values()) + 1, lambda row: row["time"] > at)
        elif self.far is not None:
            self.far.cut("silent" if self.cuts % 2 else "reset")
            self.cuts += 1
            time.sleep(CUT)
            self.far.mend()
            killed, at = time.monotonic(), time.time()
            self.wait_for_rows(AHEAD["engine"] + 1, lambda row: row["time"] > at)
        else:
            victim = self.process_of(role)
            os.kill(victim.pid, signal.SIGKILL)
            killed, at = time.monotonic(), time.time()
            self.process_of(role, victim.pid)
            self.wait_for_rows(AHEAD.get(role, 1) + 1, lambda row: row["time"] > at)
        return time.monotonic() - killed


def over_a_line(run: Run) -> FarEngine:
    """Give a run an engine behind a line that can be cut, and take its own away."""
    with contextlib.ExitStack() as ends, RunControl(run.folder) as control:
        far = FarEngine("relax/tiny-omni", RunLayout(run.folder).media, run.folder.parent / "far.log")
        ends.callback(far.close)
        own = [engine["id"] for engine in control.list()]
        control.add("far", far.url, token=far.token)
        states = [control.wait("far", lambda state: state == "current", LIMIT, time.sleep)["state"]]
        for id in own:
            control.remove(id)
            states.append(control.wait(id, lambda state: state == "gone", LIMIT, time.sleep)["state"])
        if states != ["current"] + ["gone"] * len(own):
            raise TimeoutError(f"{run.folder}: its engines are {states}; see its logs")
        ends.pop_all()  # it is the caller's now
    return far


def one_run(
    env: str, kills: list[str], folder: Path, rng: random.Random, runtime: str, bus: str, case: str
) -> tuple[dict[str, list[float]], dict[str, int], float]:
    """Seconds to recover from each kill, by role; what the journal says at the end; and the held-out reward."""
    seconds = dict[str, list[float]]()
    with contextlib.ExitStack() as ends:
        nodes = ends.enter_context(contextlib.closing(Nodes())) if NODE in kills else None
        run = Run(env, folder, 1_000_000, rng.randrange(1000), runtime, bus, nodes, case)
        ends.callback(lambda: run.process.kill())  # the last one that was started
        run.wait_for_step(7)  # a checkpoint is there
        if NETWORK in kills:
            run.far = ends.enter_context(contextlib.closing(over_a_line(run)))
        for role in kills:
            time.sleep(rng.uniform(0.0, 4.0))
            seconds.setdefault(role, []).append(run.kill(role))
            print(f"{role}: killed, trains again after {seconds[role][-1]:.1f} s", flush=True)
        now = time.time()
        run.wait_for_rows(6, lambda row: row["time"] > now)
        run.wait(lambda: steps_done(folder) >= STEPS, f"step {STEPS}")
        run.process.send_signal(signal.SIGINT)
        run.process.wait(LIMIT)
    with relax.Run.load(folder) as trained:
        return seconds, examine(folder), trained.evaluate(limit=TASKS, progress=False).mean_reward


def examine(folder: Path) -> dict[str, int]:
    """What the last checkpoint should hold, against the journal: had a group been lost, or trained twice, fewer different ones
    would be acked than the steps took."""
    journal = open_journal(RunLayout(folder).journal)
    counts = journal.counts(folder.name)
    step = int(RunLayout(folder).checkpoints()[-1].name.removeprefix("step_"))
    journal.close()
    return {"taken": step * GROUPS, "acked": counts.acked, "leased": counts.leased}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--roles", nargs="+", choices=[NOTHING, *ON_RAY, *ON_QUEUE, *ACTORS])
    parser.add_argument("--env", default="tone-v0")
    parser.add_argument("--runtime", choices=list(BY_HAND), default="local")
    parser.add_argument("--bus", choices=["local", "transfer_queue"], default="local")
    parser.add_argument("--case", choices=list(CASES), default="plain")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--together", action="store_true", help="kill the roles in the same runs, but program, node and network"
    )
    args = parser.parse_args()
    roles = [*(ON_RAY if args.runtime == "ray" else EVERYWHERE)]
    roles += [*ON_QUEUE, *ACTORS] if args.bus == "transfer_queue" else []
    roles = args.roles or [NOTHING, *roles]
    alone = [role for role in roles if role in ALONE or not args.together]
    rng = random.Random(args.seed)
    name = "chaos" if (args.runtime, args.bus) == ("local", "local") else f"chaos_{args.runtime}_{args.bus}"
    name += "" if args.case == "plain" else f"_{args.case}"
    for together in filter(None, [[role] for role in alone] + [[role for role in roles if role not in alone]]):
        seconds, held = {role: list[float]() for role in together}, list[float]()
        found: Counter[str] = Counter()
        a_run = max(args.times, 1) if together == [NETWORK] else KILLS_A_RUN  # nothing has to start again after a cut
        for first in range(0, args.times, a_run):
            kills = [role for role in together for _ in range(min(a_run, args.times - first)) if role != NOTHING]
            rng.shuffle(kills)
            with tempfile.TemporaryDirectory() as temporary:
                own, end, reward = one_run(args.env, kills, Path(temporary) / "run", rng, args.runtime, args.bus, args.case)
            for role, each in own.items():
                seconds[role] += each
            held.append(reward)
            found.update(end)
            table = [
                {
                    "killed": role,
                    "times": len(each),
                    "seconds to train again, median": statistics.median(each) if each else None,
                    "worst": max(each, default=None),
                    "roles killed in these runs": len(set(kills)),
                    "groups taken by the steps": found["taken"],
                    "different groups acked": found["acked"],
                    "left leased": found["leased"],
                    "held-out, lowest": min(held),
                    "mean": statistics.mean(held),
                }
                for role, each in seconds.items()
            ]
            save(name, table, key="killed", bars={"seconds": 15, "different groups acked": "as many as taken"})


if __name__ == "__main__":
    main()
