"""The metrics that the Grafana board of the docs asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

BOARD = Path(__file__).parent.parent / "docs" / "grafana" / "relax-gym.json"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}


def asked_for(of_runs: bool) -> set[str]:
    """Metrics in the queries of the board: those of runs, or those of the service."""
    board = json.loads(BOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 30
    names = {name for query in queries for name in re.findall(r"\brelax_\w+", query)}
    return {name for name in names if name.startswith("relax_run_") == of_runs}


def exported(page: str) -> set[str]:
    """Metrics of a page of an exporter, also those that have no sample yet."""
    return {
        family.name + suffix for family in text_string_to_metric_families(page) for suffix in SUFFIXES.get(family.type, ("",))
    }


def missing(of_runs: bool, pages: Iterable[str]) -> set[str]:
    """What the board asks for and no page has."""
    return asked_for(of_runs).difference(*map(exported, pages))
