"""Fixtures of the contract suites."""

from postgres_server import postgres
from queue_cluster import ray_cluster, shared_queue

__all__ = ["postgres", "ray_cluster", "shared_queue"]
