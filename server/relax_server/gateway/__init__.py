"""Agents that speak HTTP: an episode's model calls, steps and rewards over OpenAI's dialects, and agents' processes."""
