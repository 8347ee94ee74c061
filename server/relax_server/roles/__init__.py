"""Roles as processes on one machine: controller, rollout, engine, policy; their messages and supervision."""
