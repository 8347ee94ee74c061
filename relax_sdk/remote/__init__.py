"""Training on the machines of a service: what `Trainer(..., server=url)` does."""

from relax_sdk.remote.runtime import ServiceRuntime

__all__ = ["ServiceRuntime"]
