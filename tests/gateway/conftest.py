"""Fixtures of the gateway's tests."""

from rollout_bench import bench, processor

__all__ = ["bench", "processor"]
