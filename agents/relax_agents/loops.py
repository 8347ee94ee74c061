"""The built-in agents: they show the policy what the environment shows, and do what the policy says."""

from __future__ import annotations

from relax_sdk.session import Session


async def chat_loop(session: Session) -> None:
    """Every message of the policy is an action of the environment; tool calls are left to the environment's `step`."""
    messages = await session.reset()
    while True:
        action = await session.generate(messages)
        outcome = await session.step(action)
        if outcome.done:
            return
        messages += [action, *outcome.observation]


async def tool_loop(session: Session) -> None:
    """Messages with tool calls go to the environment's tools, and their answers to the policy; else as `chat_loop`."""
    messages = await session.reset()
    while True:
        action = await session.generate(messages)
        outcome = await (session.call_tools(action) if action.tool_calls else session.step(action))
        if outcome.done:
            return
        messages += [action, *outcome.observation]
