"""`/metrics`: what Prometheus asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Readings = Callable[[], Iterable[tuple[str, str, str, Mapping[str, float]]]]
METRICS = "metrics"
"""What other workers are asked for their counters with."""
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of the service; what can be looked up is looked up when asked for."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "relax_model_calls", "Model calls of sessions, by how they ended.", ["end"], registry=self.registry
        )
        self.tokens = Counter("relax_tokens", "Tokens of model calls.", ["kind"], registry=self.registry)
        self.seconds = Histogram(
            "relax_model_call_seconds", "From a call to its whole answer.", buckets=SECONDS, registry=self.registry
        )
        self.finished = Counter("relax_episodes", "Episodes by how they ended.", ["status"], registry=self.registry)

    def watch(self, collector: Collector) -> None:
        """Ask somebody for more, each time."""
        self.registry.register(collector)

    def families(self) -> list[dict[str, Any]]:
        """The counters as plain data, for `merged`."""
        return [
            {
                "name": family.name,
                "help": family.documentation,
                "type": family.type,
                "samples": [[sample.name, sample.labels, sample.value] for sample in family.samples],
            }
            for family in self.registry.collect()
        ]

    def text(self) -> bytes:
        """The counters in Prometheus' format."""
        return generate_latest(self.registry)


def merged(workers: Mapping[int, Iterable[Mapping[str, Any]]]) -> bytes:
    """The counters of several workers in Prometheus' format, each sample with the label `worker`.

    Args:
        workers: what `Metrics.families` gave, by the worker's number.
    """
    families: dict[str, Metric] = {}
    for worker, found in sorted(workers.items()):
        for row in found:
            family = families.setdefault(row["name"], Metric(row["name"], row["help"], row["type"]))
            for name, labels, value in row["samples"]:
                family.add_sample(name, {**labels, "worker": str(worker)}, value)
    registry = CollectorRegistry()
    registry.register(_Given(families.values()))
    return generate_latest(registry)


class _Given(Collector):
    """Metrics that were made before."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)

    def describe(self) -> Iterator[Metric]:
        return iter(())


class ServiceState(Collector):
    """Gauges of what the service is doing now.

    Args:
        read: makes rows of name, help, label and values by label; an empty label is none.
    """

    def __init__(self, read: Readings) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One gauge for each reading."""
        for name, text, label, values in self._read():
            gauge = GaugeMetricFamily(name, text, labels=[label] if label else None)
            for value_label, value in values.items():
                gauge.add_metric([value_label] if label else [], value)
            yield gauge

    def describe(self) -> Iterator[Metric]:
        """Nothing is asked when it is registered."""
        return iter(())
