"""What is kept of a key: never the key itself."""

from __future__ import annotations

import hashlib


def digest(secret: str) -> str:
    """What is stored of a key. One round is enough, as keys are random and 256 bits long."""
    return hashlib.sha256(secret.encode()).hexdigest()
