"""`/metrics`: what Prometheus asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Readings = Callable[[], Iterable[tuple[str, str, str, Mapping[str, float]]]]
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

    def text(self) -> bytes:
        """The counters in Prometheus' format."""
        return generate_latest(self.registry)


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
