"""Builds metric families for collectors."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
