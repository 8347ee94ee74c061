"""A service looked at from the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from service_process import Service

import relax_sdk as relax

ONE = {"sampling": {"max_new_tokens": 1}}


def run(service: Service, *arguments: str, ok: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "relax_sdk.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"RELAX_URL": service.url, "COLUMNS": "200"},
    )
    assert (done.returncode == 0) == ok, done.stderr
    return done.stdout + done.stderr


def heed_interrupt() -> None:
    """Background jobs of a shell begin with it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_episode_and_its_events_are_shown(service: Service) -> None:
    with relax.Client(service.url) as client, client.session("tone-v0", **ONE) as session:
        step = session.step(session.chat(session.observation))
        done = session.finish()
    shown = run(service, "episode", session.id)
    assert "which tone?" in shown and "<audio>" in shown and "[assistant]" in shown
    assert "1 out, 1 media" in shown and f"completed, reward {step.reward:g}" in shown
    assert run(service, "episode", done.trajectory_id) == shown
    lines = run(service, "follow", session.id).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["opened", "turn", "step", "finished"]
    assert session.id in run(service, "sessions")


def test_lists_and_what_is_not_there(service: Service) -> None:
    with relax.Client(service.url) as client:
        rollout = client.rollout("tone-v0", n=1, **ONE)
        rollout.wait()
    assert rollout.id in run(service, "rollouts") and "completed" in run(service, "rollouts")
    assert "no runs" in run(service, "runs") or "t_" in run(service, "runs")
    assert "no session 's_nobody'" in run(service, "episode", "s_nobody", ok=False)
    assert "allowed: of a session" in run(service, "follow", "nobody", ok=False)


def test_an_environment_is_hosted_until_ctrl_c(service: Service, tmp_path: Path) -> None:
    (tmp_path / "my_envs.py").write_text(
        "import relax_sdk as relax\n\n\nclass Say(relax.Env):\n"
        "    def reset(self, *, seed=None, options=None):\n        return 'say', {}\n\n"
        "    def step(self, action):\n        return None, 1.0, True, False, {}\n"
    )
    command = [sys.executable, "-m", "relax_sdk.cli", "envs", "host", "my_envs:Say", "--server", service.url, "--id", "say-cli"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heed_interrupt)
    timer = threading.Timer(60, process.kill)
    timer.start()
    try:
        assert process.stderr is not None
        assert "hosting say-cli" in process.stderr.readline()
        with relax.Client(service.url) as client:
            assert client.rollout("say-cli", n=2, **ONE).wait().counts["done"] == 2
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        timer.cancel()
    assert process.returncode not in (0, -signal.SIGKILL)  # it was the interrupt that ended it
