"""Builds metric families for collectors, and collects a histogram of its own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from prometheus_client.core import Metric

    Samples = Iterable[tuple[Mapping[str, str], float]]


def gauge(name: str, text: str, samples: Samples) -> Metric:
    """Build a gauge with a sample per set of labels."""
    family = GaugeMetricFamily(name, text)
    for labels, value in samples:
        family.add_sample(name, dict(labels), value)
    return family


def counter(name: str, text: str, samples: Samples) -> Metric:
    """Build a counter; its samples end in `_total`."""
    family = CounterMetricFamily(name, text)
    for labels, value in samples:
        family.add_sample(f"{name}_total", dict(labels), value)
    return family


def histogram(
    name: str,
    text: str,
    model_name: str,
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> Metric:
    """Build one model's histogram.

    Args:
        bounds: ascending upper bounds of the buckets.
        counts: per bucket, not cumulative; the last one is unbounded.
    """
    family = HistogramMetricFamily(name, text, labels=["model_name"])
    names = [*map(floatToGoString, bounds), "+Inf"]
    family.add_metric([model_name], list(zip(names, accumulate(counts), strict=True)), total)
    return family


class HistogramCollector(Collector):
    """A histogram that one thread fills once per token.

    The library's takes a lock and a method call per bucket.

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
