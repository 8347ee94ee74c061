"""Fixtures of the contract suites."""

from postgres_server import postgres

__all__ = ["postgres"]
