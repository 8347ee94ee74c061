"""Fixtures of the journal's tests."""

from postgres_server import postgres

__all__ = ["postgres"]
