"""A Prometheus histogram that one thread fills once per token.

The library's takes a lock and a method call per bucket.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from appliance.server.metrics.metric_families import histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class HistogramCollector(Collector):
    """Values in buckets.

    Args:
        bounds: ascending, inclusive upper bounds of the buckets.
    """

    def __init__(self, name: str, text: str, model_name: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._model_name = model_name
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # per bucket; the last one is unbounded
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterable[Metric]:
        yield histogram(
            self._name, self._text, self._model_name, self._bounds, self._counts, self._sum
        )
