"""Rewards that are refused, over every way in, in the same words."""

from __future__ import annotations

from typing import Any

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "value: Field required"),
    ({"value": "1"}, "value: Input should be a valid number"),
    ({"value": True}, "value: Input should be a valid number"),
    ({"value": None}, "value: Input should be a valid number"),
    ({"value": 1.0, "nmae": "judge"}, "nmae: Extra inputs are not permitted"),
    ({"value": 1.0, "name": ""}, "name: String should have at least 1 character"),
    ({"value": 1.0, "name": "x" * 101}, "name: String should have at most 100 characters"),
    ({"value": 1.0, "name": 3}, "name: Input should be a valid string"),
    ({"value": 1.0, "name": "env"}, "a reward's name must be another than 'env', which is what the environment gives"),
]
"""Bodies, and what the answer with status 400 says."""
