"""Short ways to make metric families, for collectors that read numbers kept elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client.core import Metric

    Samples = Iterable[tuple[Mapping[str, str], float]]


def gauge(name: str, text: str, samples: Samples) -> Metric:
    """A gauge with a sample for each set of labels."""
    family = GaugeMetricFamily(name, text)
    for labels, value in samples:
        family.add_sample(name, dict(labels), value)
    return family


def counter(name: str, text: str, samples: Samples) -> Metric:
    """A counter; its samples end in `_total`."""
    family = CounterMetricFamily(name, text)
    for labels, value in samples:
        family.add_sample(f"{name}_total", dict(labels), value)
    return family
