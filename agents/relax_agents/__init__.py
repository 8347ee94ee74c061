"""Agents that act in environments: the built-in chat and tool loops."""

from relax_agents.loops import chat_loop, tool_loop

__all__ = ["chat_loop", "tool_loop"]
