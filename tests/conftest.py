"""Fixtures that the whole session shares."""

from queue_cluster import ray_cluster, shared_queue

__all__ = ["ray_cluster", "shared_queue"]
