"""Fixtures of the rollout tests."""

from rollout_bench import bench, processor

__all__ = ["bench", "processor"]
