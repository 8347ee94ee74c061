"""A trained model as a folder that other tools read."""

SHARD_SIZE = 5 * 10**9
"""Bytes of one file of weights, at most."""
