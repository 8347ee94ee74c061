"""Whole runs on this machine: real engine, journal, trainer and environment processes, at the smallest sizes."""

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from our_processes import children
from prepared_job import prepared_job
from relax_server.journal import open_journal
from relax_server.roles.layout import RunLayout
from run_tokens import tokens_of
from typer.testing import CliRunner

import relax_sdk as relax
from relax_sdk.cli import app

SMALL = dict(
    rollout={"groups_per_step": 4, "group_size": 4, "max_turns": 1},
    warmup={"steps": 2, "batch_size": 4},
    eval={"every": 2, "limit": 8},
    training={"checkpoint_every": 2},
)


SAME_WEIGHTS = 1e-4
"""Largest gap of logprobs at equal weights.

The runs that are held to it replay the engine's routes: once in a few hundred steps the router's scores of one token are so
nearly tied that rounding decides, engine and trainer take different experts, and logprobs differ by 1e-4 to 1e-2
(`tests/training/test_route_ties.py`).
"""


def trainer(folder: Path, env: str = "tone-v0", **settings) -> relax.Trainer:
    return relax.Trainer(env, folder=folder, **(SMALL | settings))


def left_behind() -> list[str]:
    """Processes of ours, and weights in shared memory."""
    serving = [process for process, command in children().items() if "serve" in command]  # of tests/api
    others = {process.pid for server in serving for process in (server, *server.children(recursive=True))}
    names = [" ".join(command) for process, command in children(recursive=True).items() if process.pid not in others]
    shared = [str(p) for p in Path("/dev/shm").glob(f"relax-{os.getpid()}-*")]
    return [n for n in names if "relax_server" in n] + shared


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


class Watch:
    """An observer that acts when a step is done."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self.act, self.warnings, self.steps = act, [], []

    def stage(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def step(self, metrics: dict) -> None:
        self.steps.append(metrics["step"])
        self.act(metrics["step"])


def fit_watched(run: relax.Trainer, steps: int, act: Callable[[int], None]) -> tuple[Watch, relax.Run]:
    """`fit` with an observer of our own."""
    from relax_sdk.runtime import find_runtime

    job = prepared_job(run, steps)
    watch = Watch(act)
    find_runtime("local").fit(job, watch)
    return watch, relax.Run(job.folder, job.config, job)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> relax.Run:
    replay = {"training": SMALL["training"] | {"replay_routes": True}}
    return trainer(tmp_path_factory.mktemp("runs") / "tone", **replay).fit(steps=3, progress=False)


def test_a_run_leaves_everything_to_look_at(finished):
    folder = finished.folder
    for name in ("config.json", "metrics.jsonl", "reward.png", "journal.db", "media", "hf", "checkpoints", "tensorboard"):
        assert (folder / name).exists(), name
    assert [row["step"] for row in finished.metrics] == [1, 2, 3]
    assert list(finished.history.index) == [1, 2, 3]
    assert any(folder.joinpath("tensorboard").iterdir())
    assert not left_behind()


def test_every_step_reports_what_a_user_is_shown(finished):
    row = finished.metrics[-1]
    for name in ("reward", "staleness_mean", "queue", "seconds_wait", "seconds_train", "seconds_publish", "tokens_per_second"):
        assert name in row, name
    assert finished.metrics[1]["eval_n"] == 8 and finished.metrics[2]["eval_n"] == 8
    assert row["staleness_histogram"] and all(int(k) <= 1 for k in row["staleness_histogram"])


def test_engine_and_trainer_agree_on_fresh_samples(finished):
    fresh = [row["logprob_gap_max"] for row in finished.metrics if row["staleness_max"] == 0]
    assert fresh and max(fresh) <= SAME_WEIGHTS


def test_groups_are_trained_once_and_acked(finished):
    journal = open_journal(RunLayout(finished.folder).journal)
    counts = journal.counts(finished.folder.name)
    assert counts.acked == 3 * 4 and counts.leased == 0
    group = journal.groups(finished.folder.name, limit=1)[0]
    assert len(group.trajectories) == 4 and group.trajectories[0].turns[0].media[0].kind == "audio"


def test_the_trained_model_is_a_hugging_face_folder(finished):
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration as Model

    assert Model.from_pretrained(finished.weights).num_parameters() > 1e6


def test_evaluate_and_generate_use_the_trained_model(finished, capsys, monkeypatch):
    monkeypatch.chdir(finished.folder.parent)
    with relax.Run.load(finished.folder.name) as run:  # a relative folder is as good as an absolute one
        evaluation = run.evaluate(limit=8)
        assert "evaluation of tone-v0 [eval] · starting" in capsys.readouterr().err
        assert evaluation.n == 8 and evaluation.mean_reward == pytest.approx(finished.metrics[-1]["eval_reward"])
        assert isinstance(run.generate("A or B?").text, str)
    assert not left_behind()


def test_a_script_that_evaluates_ends_cleanly(finished):
    script = f"import relax_sdk as relax; print(relax.Run.load({str(finished.folder)!r}).evaluate(limit=4))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "(n=4)" in done.stdout
    assert "Traceback" not in done.stderr
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(finished.folder) in " ".join(p.info["cmdline"] or [])]


def test_a_longer_run_goes_on_where_the_first_ended(tmp_path):
    """With a format warm-up, a KL reference and replayed routes: the trainer has to have all three again."""
    folder = tmp_path / "run"
    replay = SMALL["training"] | {"replay_routes": True}
    trainer(folder, training=replay, algorithm={"kl_coef": 0.03}, warmup={"steps": 2}).fit(steps=2, progress=False)
    run = relax.Trainer.from_run(folder).fit(steps=4, resume=True, progress=False)
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert all(row["kl"] > 0 for row in run.metrics[2:])
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    assert counts.acked == 4 * 4


def test_on_policy_runs_of_one_seed_are_the_same_run_in_either_mode(tmp_path):
    """No sample is old, the tokens are equal, and, as the ratio is to the trainer's own logprobs, the weights are, too."""
    same = {"algorithm": {"old_logprobs": "recompute", "correction": "none"}}
    replay = {"training": SMALL["training"] | {"replay_routes": True}}
    runs = []
    for settings in ({"mode": "colocate"}, {"mode": "async", "max_staleness": 0}):
        run = trainer(tmp_path / settings["mode"], seed=3, **settings, **replay, **same).fit(steps=3, progress=False)
        assert [row["staleness_max"] for row in run.metrics] == [0, 0, 0]
        assert run.metrics[-1]["dropped_total"] == 0
        assert max(row["logprob_gap_max"] for row in run.metrics) <= SAME_WEIGHTS
        runs.append(run)
    first, second = (tokens_of(run, 3 * 4) for run in runs)
    assert first == second and len(first) == 3 * 4 * 4
    assert (runs[0].weights / "model.safetensors").read_bytes() == (runs[1].weights / "model.safetensors").read_bytes()


def test_an_episode_of_a_run_is_played_again_with_the_weights_it_was_played_with(finished):
    result = CliRunner().invoke(app, ["replay", str(finished.folder), "--episode", "eval/3/1", "--model", "run"])
    assert result.exit_code == 0, result.output
    assert "the same: observations, actions, rewards, " in result.stdout and "sampled tokens" in result.stdout
    assert "note:" not in result.stdout and not left_behind()


def test_colocate_takes_the_engines_memory_only_after_an_evaluation(tmp_path):
    settings = {"mode": "colocate", "eval": {"every": 1, "limit": 200}}
    run = trainer(tmp_path / "run", **settings).fit(steps=4, progress=False)
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4]
    assert all(row["eval_version_min"] == row["eval_version_max"] == row["step"] for row in run.metrics)
    assert [(row["eval_n"], row["eval_failures"]) for row in run.metrics] == [(200, {})] * 4


def test_larger_staleness_is_kept_within_its_bound(tmp_path):
    run = trainer(tmp_path / "run", max_staleness=3).fit(steps=6, progress=False)
    assert max(row["staleness_max"] for row in run.metrics) <= 3


def send_signal(role: str, number: int) -> int:
    """Signal the one process of a role; returns its id."""
    (victim,) = [process for process, command in children().items() if role in " ".join(command)]
    victim.send_signal(number)
    return victim.pid


def went_on(watch: Watch, run: relax.Run, steps: int, replaced: int) -> None:
    """Processes were replaced, every step was done, and no group was lost or trained on twice."""
    assert len([w for w in watch.warnings if "again" in w or "new one" in w or "restarting" in w]) >= replaced
    assert [row["step"] for row in run.metrics] == list(range(1, steps + 1))
    counts = open_journal(RunLayout(run.folder).journal).counts(run.folder.name)
    assert counts.acked == steps * 4 and counts.leased == 0
    assert not left_behind()


class InTurn:
    """Does something to one role after another, each time two steps after the last one is back.

    Args:
        act: gets the role.
    """

    def __init__(self, act: Callable[[str], None]) -> None:
        self.act = act
        self.left = ["policy", "rollout", "engines.embedded"]
        self.next = 2

    def __call__(self, step: int) -> None:
        if self.left and step >= self.next:
            self.next = step + 3
            self.act(self.left.pop(0))


def test_killing_each_process_loses_nothing(tmp_path):
    in_turn = InTurn(lambda role: send_signal(role, signal.SIGKILL) and None)
    watch, run = fit_watched(trainer(tmp_path / "run"), 12, in_turn)
    assert not in_turn.left
    went_on(watch, run, 12, replaced=3)


def test_killing_what_is_just_being_started_loses_nothing(tmp_path):
    """The process that takes a dead one's place dies before it is ready."""
    killed: list[int] = []

    def kill(role: str) -> None:
        killed.append(send_signal(role, signal.SIGKILL))
        threading.Thread(target=kill_next, args=(role, len(killed) + 1)).start()

    def kill_next(role: str, until: int) -> None:
        end = time.monotonic() + 60
        while len(killed) < until and time.monotonic() < end:
            for process, command in children().items():
                if process.pid not in killed and role in " ".join(command):
                    process.kill()
                    killed.append(process.pid)

    in_turn = InTurn(kill)
    watch, run = fit_watched(trainer(tmp_path / "run"), 12, in_turn)
    assert len(killed) == 6
    went_on(watch, run, 12, replaced=3)


def test_a_process_that_hangs_is_replaced(tmp_path, monkeypatch):
    from relax_server.roles import fleet, main_roles

    def freeze(role: str) -> None:
        monkeypatch.setattr(main_roles, "SILENCE_SECONDS", 4.0)
        monkeypatch.setattr(main_roles, "STEP_SECONDS", 6.0)
        send_signal(role, signal.SIGSTOP)

    monkeypatch.setattr(fleet, "MAX_MISSES", 1)
    in_turn = InTurn(freeze)
    watch, run = fit_watched(trainer(tmp_path / "run"), 12, in_turn)
    assert not in_turn.left
    went_on(watch, run, 12, replaced=3)


def test_shared_memory_that_vanishes_is_made_again(tmp_path):
    """Such as by a clean-up of /dev/shm, with the weights that engines are to load."""

    def clean_up(step: int) -> None:
        if step == 3 and not gone:
            gone.extend(Path("/dev/shm").glob(f"relax-{os.getpid()}-*"))
            shutil.rmtree(gone[0], ignore_errors=True)

    gone: list[Path] = []
    watch, run = fit_watched(trainer(tmp_path / "run"), 6, clean_up)
    assert len(gone) == 1
    went_on(watch, run, 6, replaced=1)


def test_an_engine_lost_too_often_ends_the_run(tmp_path, monkeypatch):
    def kill(step: int) -> None:
        for process, command in children().items():
            if "engines.embedded" in " ".join(command):
                process.send_signal(signal.SIGKILL)

    monkeypatch.setattr("relax_server.roles.restarts.MAX_RESTARTS", 0)
    with pytest.raises(relax.RunError, match=r"the engine e1 ended 1 times(?s:.)*relax train --resume"):
        fit_watched(trainer(tmp_path / "run"), 1000, kill)
    assert not left_behind()


async def test_fit_works_inside_a_running_event_loop(tmp_path):
    assert asyncio.get_running_loop().is_running()
    run = trainer(tmp_path / "run").fit(steps=1, progress=False)
    assert len(run.metrics) == 1


def test_ctrl_c_ends_with_a_checkpoint_and_can_be_resumed(tmp_path):
    folder = tmp_path / "run"
    script = textwrap.dedent(
        f"""
        import signal
        import relax_sdk as relax
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell begin with it ignored
        relax.Trainer("tone-v0", folder={str(folder)!r}, **{SMALL!r}).fit(steps=100000)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    metrics = folder / "metrics.jsonl"
    assert process.stderr is not None
    for line in process.stderr:
        if " step " in line and metrics.exists() and metrics.read_text():
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(60) != 0
    assert "ended early" in rest and "relax train --resume" in rest
    done = json.loads(metrics.read_text().splitlines()[-1])["step"]
    run = relax.Trainer.from_run(folder).fit(steps=done + 1, resume=True, progress=False)
    assert run.metrics[-1]["step"] == done + 1


def test_a_second_program_is_refused_and_goes_on_at_once_when_the_first_is_killed(tmp_path):
    folder = tmp_path / "run"
    script = f"import relax_sdk as relax; relax.Trainer('tone-v0', folder={str(folder)!r}, **{SMALL!r}).fit(steps=100000)"
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: RunLayout(folder).checkpoints()[1:], 120)
        second = subprocess.run(
            [sys.executable, "-m", "relax_sdk.cli", "train", "--resume", str(folder)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 1 and f"in use by process {process.pid} on " in second.stderr
        assert relax.Run.load(folder).metrics  # to look on is for all
        process.kill()

    def traces() -> list[str]:
        commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
        return [c for c in commands if str(folder) in c] + [str(p) for p in Path("/dev/shm").glob(f"relax-{process.pid}-*")]

    wait_until(lambda: not traces(), 15)
    done = int(RunLayout(folder).checkpoints()[-1].name.removeprefix("step_"))
    run = relax.Trainer.from_run(folder).fit(steps=done + 3, resume=True, progress=False)
    assert [row["step"] for row in run.metrics] == list(range(1, done + 4))
    counts = open_journal(RunLayout(folder).journal).counts(folder.name)
    assert counts.acked == (done + 3) * 4 and counts.leased == 0


def test_what_killed_runs_left_in_shared_memory_is_swept(tmp_path, monkeypatch):
    from relax_server.roles import shared_memory

    monkeypatch.setattr(shared_memory, "root", lambda: tmp_path)
    dead, alive, other = tmp_path / "relax-999999999-abc", tmp_path / f"relax-{os.getpid()}-abc", tmp_path / "relax-notes-x"
    for path in (dead, alive, other):
        path.mkdir()
    shared_memory.sweep()
    assert not dead.exists() and alive.exists() and other.exists()


def test_shared_memory_is_removed_from_under_a_writer(tmp_path):
    from relax_server.roles import shared_memory

    folder = tmp_path / "relax-1-abc"
    (folder / "features").mkdir(parents=True)
    begun, refused = threading.Event(), threading.Event()

    def write() -> None:
        try:
            for i in itertools.count():
                (folder / "features" / str(i)).write_bytes(b"x" * 1000)
                if i == 100:
                    begun.set()
        except FileNotFoundError:
            refused.set()

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert begun.wait(5)
    shared_memory.remove(folder)
    assert list(tmp_path.iterdir()) == []
    assert refused.wait(5)


class BrokenEnv(relax.Env):
    """Raises in step."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "x", {}

    def step(self, action):
        raise RuntimeError("the battery is empty")


@pytest.mark.nightly
def test_an_environment_that_always_raises_ends_the_run_with_its_error(tmp_path):
    small = SMALL | {"rollout": SMALL["rollout"] | {"max_failed_groups": 3}, "warmup": {}}
    run = relax.Trainer(BrokenEnv, folder=tmp_path / "run", **small)
    with pytest.raises(relax.RunError, match=r"BrokenEnv.*task.*battery is empty"):
        run.fit(steps=2, progress=False)
    assert not left_behind()


def test_settings_that_cannot_work_are_refused_at_once(tmp_path):
    with pytest.raises(relax.ConfigError, match="max_staleness must be 0"):
        relax.Trainer("tone-v0", mode="colocate", max_staleness=1)
    with pytest.raises(relax.ConfigError, match="takes no"):
        trainer(tmp_path / "a", model="relax/tiny-llama").fit(progress=False)
    with pytest.raises(relax.ConfigError, match="relax/tiny-omni"):
        trainer(tmp_path / "b", model="no/such-model").fit(progress=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(relax.ConfigError, match="cannot be written"):
        trainer(tmp_path / "file" / "run").fit(progress=False)


def test_a_folder_in_use_is_not_overwritten(finished):
    with pytest.raises(relax.ConfigError, match="already holds a run"):
        trainer(finished.folder).fit(steps=1, progress=False)


def test_a_checkpoint_of_another_configuration_is_refused(finished, tmp_path):
    import shutil

    folder = shutil.copytree(finished.folder, tmp_path / "copy")
    with pytest.raises(relax.ConfigError, match="begun with model"):
        trainer(folder, model="relax/tiny-qwen3").fit(steps=5, resume=True, progress=False)
    with pytest.raises(relax.RunError, match="CheckpointError"):
        trainer(folder, optimizer={"beta2": 0.5}).fit(steps=5, resume=True, progress=False)
