"""Importing the SDK is cheap: nothing heavy comes with it, and everything in `__all__` is there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "transformers", "ray", "megatron", "datasets", "pandas", "matplotlib", "sklearn", "fastapi", "sqlalchemy"]
DECODERS = ["av", "decord", "soundfile", "soxr", "PIL.Image"]


def modules_after(statement: str) -> set[str]:
    """Names in `sys.modules` of a fresh interpreter after `statement`."""
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    return set(json.loads(run.stdout))


@pytest.mark.parametrize("statement", ["import relax_sdk", "import relax_envs", "import relax_sdk; relax_sdk.list_envs()"])
def test_nothing_heavy_is_imported(statement: str) -> None:
    loaded = modules_after(statement)
    assert "relax_sdk.env" in loaded
    assert not loaded & set(HEAVY)


def test_decoders_wait_until_they_are_needed() -> None:
    assert not modules_after("import relax_sdk, relax_envs") & set(DECODERS)


def test_all_public_names_exist() -> None:
    import relax_sdk

    assert len(set(relax_sdk.__all__)) == len(relax_sdk.__all__)
    missing = [name for name in relax_sdk.__all__ if not hasattr(relax_sdk, name)]
    assert not missing
