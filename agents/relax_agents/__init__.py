"""Agents that act in environments: the built-in chat and tool loops."""
