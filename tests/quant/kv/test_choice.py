"""Formats within a budget of bits."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from appliance.kernels.cache.kv_format import KVFormat
from appliance.quant.kv.calibrate import (
    CHOICES,
    MEASURED,
    MeasuredLayer,
    bits_per_element,
    choose_formats,
    mean_bits,
)


def layer(errors: list[float]) -> MeasuredLayer:
    zero = torch.zeros(2, 1)
    named = dict.fromkeys(MEASURED, 1.0) | dict(zip(CHOICES, errors, strict=True))
    bits = {form: bits_per_element(form, 64) for form in MEASURED}
    return MeasuredLayer(zero, zero, zero, named, {}, 128, bits)


@settings(max_examples=60, derandomize=True, database=None)
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=4, max_size=4), min_size=1, max_size=6),
    st.floats(4, 16),
)
def test_a_budget_is_kept_and_more_of_it_never_costs_quality(
    errors: list[list[float]], budget: float
) -> None:
    layers = [layer(sorted(of, reverse=True)) for of in errors]
    chosen = choose_formats(layers, budget)
    if chosen is None:
        assert budget < bits_per_element(KVFormat.INT4_SEALED, 64)
        return
    assert mean_bits(layers, chosen) <= budget + 1e-9
    least = [KVFormat.INT4_SEALED] * len(layers)
    assert sum(of.best(form) for of, form in zip(layers, chosen, strict=True)) <= sum(
        of.best(form) for of, form in zip(layers, least, strict=True)
    )


def test_bits_go_where_they_help_most() -> None:
    layers = [layer([0.1, 0.09, 0.08, 0.0]), layer([0.9, 0.1, 0.0, 0.0])]
    assert choose_formats(layers, 16) == [KVFormat.BF16, KVFormat.INT8]
    assert choose_formats(layers, 5.7) == [KVFormat.INT4_SEALED, KVFormat.K8V4]
    assert choose_formats(layers, 4.0) is None
