"""Every architecture in every layout of the table in docs/layouts.md: trained as in one process, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from layout_steps import Alone, compare, of_one_process
from rank_workers import Ranks
from relax_server.models.families import TABLE
from relax_server.models.families.page import LAYOUTS, refusal

from benchmarks.layouts import MEASURED
from relax_sdk import ConfigError
from relax_sdk.layout import LayoutConfig

pytestmark = pytest.mark.nightly

Note = Callable[[str, object], None]


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return of_one_process(ranks, lambda: tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", TABLE)
def test_an_architecture_is_trained_in_a_layout_or_refused(
    ranks: Ranks, alone: Alone, tmp_path: Path, record_property: Note, family: str, layout: str
) -> None:
    its, shape = TABLE[family], LAYOUTS[layout]
    reason = refusal(its, shape)
    if reason is None:  # experts that are divided are those that the engine chose
        settings = {"replay_routes": True} if shape.ep > 1 else {}
        found = compare(ranks, alone, tmp_path, its.tiny, shape, **settings)
        record_property(MEASURED, json.dumps({"architecture": family, "layout": layout} | found))
        return
    with pytest.raises(ConfigError) as refused:
        compare(ranks, alone, tmp_path, its.tiny, shape)
    assert str(refused.value) == reason
    record_property(MEASURED, json.dumps({"architecture": family, "layout": layout, "refused": reason}))


@pytest.mark.parametrize("family", TABLE)
def test_an_architecture_is_trained_in_an_interleaved_pipeline(
    ranks: Ranks, alone: Alone, deeper: Any, tmp_path: Path, record_property: Note, family: str
) -> None:
    """With four layers: the three of the built-in models cannot be shared evenly."""
    found = compare(ranks, alone, tmp_path, deeper(family, 4), LayoutConfig(pp=2, vpp=2))
    record_property(MEASURED, json.dumps({"architecture": family, "layout": "`pp=2`, `vpp=2`"} | found))
