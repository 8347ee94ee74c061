"""Rollouts: episodes played against engines, recorded token by token, made durable as groups."""

from relax_server.rollout.evaluation import EvalResult
from relax_server.rollout.pool import EnginePool
from relax_server.rollout.stats import RolloutStats
from relax_server.rollout.worker import RolloutWorker

__all__ = ["EnginePool", "EvalResult", "RolloutStats", "RolloutWorker"]
