"""Prometheus: the newest figures of a run, for a scraper on this machine."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from relax_server.trackers.base import End, TrackedRun, Tracker

PREFIX = "relax_run_"
PORT = 9464
"""The usual port of an exporter of metrics."""
HELD_OUT = "eval_"
"""Figures of a held-out evaluation begin with this."""


class PrometheusTracker(Tracker, Collector):
    """Serves the newest figures at `http://host:port/metrics` while the run goes on.

    A figure `reward` is the gauge `relax_run_reward`; a nested one, `rewards/env`, is `relax_run_rewards{name="env"}`. All
    have the labels `run` (the name of the run folder) and `env`.

    Args:
        port: to listen on; 0 takes a free one, which stands in `trackers/prometheus.json` of the run folder.
        host: to bind to. There is no key: bind only to what is private.
    """

    def __init__(self, port: int = PORT, host: str = "127.0.0.1") -> None:
        self._port, self._host = port, host
        self._lock = threading.Lock()
        self._labels: dict[str, str] = {}
        self._figures: dict[str, float] = {}
        self._step = self._warnings = 0
        self._server: Any = None

    def begin(self, run: TrackedRun) -> None:
        self._labels = {"run": run.name, "env": run.config.env}
        registry = CollectorRegistry()
        registry.register(self)
        self._server, self._thread = start_http_server(self._port, self._host, registry)
        port = self._server.server_port
        run.note("prometheus", {"port": port, "url": f"http://{self._host}:{port}/metrics"})

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        with self._lock:
            if step > self._step:  # what is held out is known for some steps only, and stays
                self._figures = {name: value for name, value in self._figures.items() if name.startswith(HELD_OUT)}
            newest = step >= self._step
            self._figures.update({k: v for k, v in figures.items() if newest or k.startswith(HELD_OUT)})
            self._step = max(step, self._step)
            self._figures["step"] = self._step

    def warning(self, step: int, text: str) -> None:
        with self._lock:
            self._warnings += 1

    def collect(self) -> Iterator[Metric]:
        """A gauge for each figure, and a counter of warnings."""
        with self._lock:
            figures, warnings = dict(self._figures), self._warnings
        families: dict[str, Metric] = {}
        for tag, value in figures.items():
            outer, _, inner = tag.partition("/")
            name = PREFIX + re.sub(r"\W", "_", outer)
            family = families.setdefault(name, Metric(name, f"The figure {outer} of the newest step.", "gauge"))
            family.add_sample(name, self._labels | ({"name": inner} if inner else {}), value)
        counter = Metric(PREFIX + "warnings", "Warnings and findings of the run since it was started.", "counter")
        counter.add_sample(PREFIX + "warnings_total", self._labels, warnings)
        return iter([*families.values(), counter])

    def describe(self) -> Iterator[Metric]:
        """Nothing is asked when it is registered."""
        return iter(())

    def close(self, end: End) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5)
