"""Who may call a server of ours that is not the rollout service: an engine, the gateway of agents, the control of a run."""

from relax_server.guard.inside.relax_guard import (
    ADDRESS,
    TOKEN,
    EngineGuard,
    Guard,
    GuardedApp,
    Refusal,
    hosts_of,
    is_loopback,
    new_token,
)

__all__ = ["ADDRESS", "TOKEN", "EngineGuard", "Guard", "GuardedApp", "Refusal", "hosts_of", "is_loopback", "new_token"]
