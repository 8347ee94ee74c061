"""Fixtures of the tests of buses."""

from queue_cluster import ray_cluster, shared_queue

__all__ = ["ray_cluster", "shared_queue"]
