"""Relax Gym's SDK."""
