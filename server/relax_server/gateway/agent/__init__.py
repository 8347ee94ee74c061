"""Agents in processes of their own, inside training."""
