"""Environments that run in one process and are stepped by a service in another."""

from relax_sdk.hosting.client import Hosting, host

__all__ = ["Hosting", "host"]
