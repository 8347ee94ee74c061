"""Agents that act in environments: the built-in chat and tool loops, and black-box agents, each a program of its own."""

from relax_agents.loops import chat_loop, tool_loop

__all__ = ["chat_loop", "tool_loop"]
