from __future__ import annotations

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from appliance.server.metrics.metric_families import HistogramCollector

BOUNDS = (0.002, 0.01, 1, 2.5, 60)


@given(values=st.lists(st.sampled_from([*BOUNDS, 0.0, 0.0021, 59.0, 61.0]), max_size=20))
def test_it_says_what_the_librarys_own_says(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = HistogramCollector("a:b_seconds", "Help.", "m", BOUNDS)
    ours.register(one)
    family = prometheus_client.Histogram(
        "a:b_seconds", "Help.", ["model_name"], buckets=BOUNDS, registry=theirs
    )
    other = family.labels("m")
    for value in values:
        one.observe(value)
        other.observe(value)
    expected = generate_latest(theirs).decode().splitlines()
    # The time at which a histogram was created is useless.
    expected = [line for line in expected if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == expected


def test_a_value_that_was_seen_several_times() -> None:
    registry = CollectorRegistry()
    histogram = HistogramCollector("a", "Help.", "m", BOUNDS)
    registry.register(histogram)
    histogram.observe(0.5, 3)
    text = generate_latest(registry).decode()
    assert 'a_bucket{le="0.01",model_name="m"} 0.0' in text
    assert 'a_bucket{le="1.0",model_name="m"} 3.0' in text
    assert 'a_sum{model_name="m"} 1.5' in text
