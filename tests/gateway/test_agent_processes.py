"""Black-box agents in processes of their own are played, recorded, trained, and ended."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import psutil
import pytest
from relax_server.gateway.agent.gateway import AgentGateway
from relax_server.rollout.threads import CallThreads
from reward_bodies import REFUSED

import relax_sdk as relax
from relax_sdk import MediaStore, Status

AGENT = """
from relax_sdk.client import attach

with attach() as session:
    print("playing", session.id)
    messages = list(session.observation)
    while True:
        messages.append(session.chat(messages, max_tokens=1))
        step = session.step(messages[-1])
        if step.done:
            break
        messages += step.observation
    session.reward(0.25, "from outside")
    session.finish()
"""


class Once(relax.Env):
    """One turn; the reward is 1."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "go", {}

    def step(self, action):
        return None, 1.0, True, False, {}


@pytest.fixture
async def play(bench, processor, tmp_path):
    """`play(program, …)` plays a group whose agent is the program."""
    gateways = []

    async def make(program: str, **settings):
        script = tmp_path / "agent.py"
        script.write_text(textwrap.dedent(program))
        store = MediaStore(tmp_path / "media")
        gateway = AgentGateway([sys.executable, str(script)], processor, store, CallThreads("media", 1))
        gateways.append(gateway)
        return await bench(Once, agent=gateway.play, **({"group_size": 1, "max_retries": 0} | settings)).group()

    yield make
    for gateway in gateways:
        await gateway.close()


async def test_an_agent_plays_and_is_recorded(play):
    result = await play(AGENT, group_size=2)
    for trajectory in result.group.trajectories:
        assert trajectory.status is Status.COMPLETED and len(trajectory.turns) == 1
        assert trajectory.rewards == {"env": 1.0, "from outside": 0.25} and trajectory.reward == 1.25
        assert "playing s_" in trajectory.info["agent_output"]
    assert len({t.info["agent_output"] for t in result.group.trajectories}) == 2


async def test_an_agent_that_fails_fails_its_episode_with_its_last_words(play):
    result = await play("print('about to fall over'); raise SystemExit(3)")
    assert result.group is None
    assert "exit code 3" in result.error and "about to fall over" in result.error


async def test_an_agent_that_gives_up(play):
    result = await play("from relax_sdk.client import attach\nwith attach() as session:\n    raise KeyError('oh')")
    assert result.group is None and "gave up" in result.error and "KeyError: 'oh'" in result.error


async def test_a_program_that_is_not_there(bench, processor, tmp_path):
    gateway = AgentGateway("no-such-program --x", processor, MediaStore(tmp_path / "media"), CallThreads("media", 1))
    result = await bench(Once, agent=gateway.play, group_size=1, max_retries=0).group()
    assert "no-such-program" in result.error and "cannot be started" in result.error
    await gateway.close()
    for wrong in ("", [], "python 'x"):
        with pytest.raises(relax.ConfigError, match="agent"):
            AgentGateway(wrong, processor, MediaStore(tmp_path / "media"), CallThreads("media", 1))


async def test_an_agent_that_hangs_is_killed_with_all_it_started(play, tmp_path):
    program = f"""
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    open({str(tmp_path / "pids")!r}, "w").write(f"{{child.pid}}")
    print("waiting", flush=True)
    time.sleep(1000)
    """
    result = await play(program, episode_timeout=2.0)
    assert result.group is None and "took longer than 2 s" in result.error
    child = int((tmp_path / "pids").read_text())
    gone, _ = psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=10)
    assert not psutil.pid_exists(child) or gone or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


async def test_an_agent_that_knows_of_no_limit_falls_over_it_and_is_scored(play):
    program = """
    from openai import OpenAI
    policy, messages = OpenAI(max_retries=0), [{"role": "user", "content": "go"}]
    while True:
        policy.chat.completions.create(model="policy", messages=messages)
    """
    result = await play(program, max_turns=2)
    (trajectory,) = result.group.trajectories
    assert trajectory.status is Status.TRUNCATED and len(trajectory.turns) == 2
    assert "max_turns = 2" in trajectory.info["agent_output"]


async def test_only_its_own_key_opens_a_session(play):
    program = """
    import os, urllib.error, urllib.request
    url = os.environ["RELAX_BASE_URL"] + "/v1/sessions/" + os.environ["RELAX_SESSION_ID"]
    for key in ("", "wrong"):
        try:
            urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"}))
        except urllib.error.HTTPError as error:
            print("refused", error.code)
    """
    result = await play(program, on_failure="count")
    assert result.trajectories[0].info["agent_output"].count("refused 404") == 2


async def test_a_wrong_reward_is_refused_as_the_service_refuses_it(play):
    program = f"""
    import json, os, urllib.error, urllib.request
    url = os.environ["RELAX_BASE_URL"] + "/v1/sessions/" + os.environ["RELAX_SESSION_ID"] + "/reward"
    key = {{"Authorization": "Bearer " + os.environ["RELAX_SESSION_KEY"], "Content-Type": "application/json"}}
    for body in {[body for body, _ in REFUSED]!r}:
        try:
            urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), key))
            print("taken", body)
        except urllib.error.HTTPError as error:
            print(error.code, json.load(error)["error"]["message"])
    """
    result = await play(program, on_failure="count")
    assert result.trajectories[0].info["agent_output"].splitlines() == [f"400 {says}" for _, says in REFUSED]


def test_training_with_an_agent_that_knows_only_the_openai_client(tmp_path: Path) -> None:
    small = {"groups_per_step": 1, "group_size": 2, "max_turns": 1}
    run = relax.Trainer(
        "tone-v0",
        agent=f"{sys.executable} -m relax_agents.openai_loop",
        folder=tmp_path / "run",
        rollout=small,
        warmup={"steps": 2, "batch_size": 2},
        eval={"every": 0, "limit": 1},
    ).fit(steps=2, progress=False)
    assert [(row["step"], row["n_samples"]) for row in run.metrics] == [(1, 2), (2, 2)]
    assert max(row["logprob_gap_max"] for row in run.metrics if row["staleness_max"] == 0) < 1e-2
    assert all(row["status"] == {"completed": 2} for row in run.metrics)
