"""The black-box agents as processes, and what a policy says to each, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from service_process import Service

AGENTS = ("openai_loop", "tool_calling", "react", "pydantic_ai_agent")
LIMIT = 120.0
"""Seconds for an episode, the start of its process included."""


def call(agent: str, tool: str, **arguments: Any) -> str:
    """An answer that calls a tool, in the agent's protocol."""
    if agent == "react":
        return f"Thought: I should {tool}.\nAction: {tool}\nAction Input: {json.dumps(arguments)}"
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def words(agent: str, text: str) -> str:
    """An answer in words, in the agent's protocol."""
    return f"Thought: I know.\nFinal Answer: {text}" if agent == "react" else text


def play(service: Service, agent: str, *arguments: str, ends: int = 0, **opening: Any) -> dict[str, Any]:
    """Play an episode of the service in a process of its own; returns the trajectory.

    Args:
        service: that runs.
        agent: a module of `relax_agents`.
        *arguments: of its command line.
        ends: the exit code that is expected.
        **opening: of the session.
    """
    session = service.open(**opening)
    told = {"RELAX_BASE_URL": service.url, "RELAX_SESSION_ID": session["id"], "RELAX_SESSION_KEY": session["key"]}
    told |= {"OPENAI_BASE_URL": session["base_url"], "OPENAI_API_KEY": session["key"]}
    command = [sys.executable, "-m", f"relax_agents.{agent}", *arguments]
    done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == ends, done.stderr
    with service.client() as client:
        answer = client.get(f"/v1/trajectories/{session['trajectory_id']}")
    assert answer.status_code == 200, f"{answer.text}\n{done.stderr}"
    return answer.json()
