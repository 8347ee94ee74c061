"""A black-box agent that calls tools: each call of an answer is carried out by itself. `python -m relax_agents.tool_calling`.

It is told where to go as `relax_agents.openai_loop` is. The policy is offered the environment's tools in every request; an
answer without a call is an action of its own.
"""

from __future__ import annotations

from typing import Any

from openai import OpenAI

from relax_sdk.client import RemoteSession, attach


def main() -> None:
    """Play one episode."""
    with attach() as session:
        play(OpenAI(), session)
        session.finish()


def play(policy: OpenAI, session: RemoteSession) -> None:
    """Ask the policy and do what it says until the environment ends the episode."""
    messages: list[Any] = list(session.observation)
    offered: dict[str, Any] = {"tools": session.tools} if session.tools else {}
    done = False
    while not done:
        answer = policy.chat.completions.create(model="policy", messages=messages, **offered).choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        observation, done = act(session, messages[-1])
        messages += observation


def act(session: RemoteSession, answer: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """Carry an answer out, its tool calls one after the other until one ends the episode.

    What this agent can do by itself would be done here: a tool of its own is a name that is not passed on to the session.

    Returns:
        What the policy is shown next, a tool message for each call, and whether the episode is over.
    """
    shown: list[dict[str, Any]] = []
    for action in [{**answer, "tool_calls": [call]} for call in answer.get("tool_calls", ())] or [answer]:
        step = session.step(action)
        shown += step.observation
        if step.done:
            return shown, True
    return shown, False


if __name__ == "__main__":
    main()
