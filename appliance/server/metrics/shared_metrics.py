"""Prometheus metrics of the whole server, and the text of all metrics.

Merges the models' families of the same name.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Summary, generate_latest
from prometheus_client.registry import Collector

from appliance.server.metrics.metric_families import gauge
from appliance.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric


class SharedMetrics:
    """Counts by key and by route, over all models.

    Attributes:
        registries: this one, and each model's.
    """

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self.registries = [registry]
        self._waits = Summary(
            "appliance_queue_wait_seconds",
            "In the engine's queue, by the name of the key.",
            ["key"],
            registry=registry,
        )
        self._shed = Counter(
            "appliance_requests_shed",
            "Requests refused because too many waited, by the name of their key.",
            ["key"],
            registry=registry,
        )
        self._expired = Counter(
            "appliance_requests_expired",
            "Requests or choices whose time was over while they waited or ran, by key.",
            ["key", "state"],
            registry=registry,
        )
        self._responses = Counter(
            "appliance_http_responses",
            "HTTP responses by route and status.",
            ["route", "status"],
            registry=registry,
        )
        registry.register(_Build())

    def add(self, collector: Collector) -> None:
        self.registries[0].register(collector)

    def know_keys(self, names: Iterable[str]) -> None:
        """Start each key's counters at zero, so that no series begins with its first event."""
        for name in names:
            self._waits.labels(name)
            self._shed.labels(name)
            for state in ("waiting", "running"):
                self._expired.labels(name, state)

    def observe_wait(self, key: str, seconds: float) -> None:
        """Add a request's time in the queue."""
        self._waits.labels(key).observe(seconds)

    def count_shed(self, key: str) -> None:
        """Count a request refused because the queue was full."""
        self._shed.labels(key).inc()

    def count_expired(self, key: str, state: str) -> None:
        """Count a request that timed out while `waiting` or `running`."""
        self._expired.labels(key, state).inc()

    def count_response(self, route: str, status: int) -> None:
        self._responses.labels(route, str(status)).inc()

    def render(self) -> bytes:
        merged = CollectorRegistry()
        merged.register(_Merged(self.registries))
        return generate_latest(merged)


class _Merged(Collector):
    """All families of several registries, each name once."""

    def __init__(self, registries: Iterable[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                if family.name in found:
                    found[family.name].samples += family.samples
                else:
                    found[family.name] = family
        return found.values()


class _Build(Collector):
    """The running version."""

    def collect(self) -> Iterable[Metric]:
        build = {"version": __version__, "python": platform.python_version()}
        yield gauge("appliance_build_info", "What is running.", [(build, 1)])
