"""What tests of engines of somebody else need."""

from __future__ import annotations

import pytest


@pytest.fixture
def sglang() -> None:
    """The test is skipped where there is no environment with SGLang."""
    from relax_server.engines.sglang.environment import find_python

    from relax_sdk.errors import ConfigError

    try:
        find_python()
    except ConfigError as error:
        pytest.skip(str(error))
