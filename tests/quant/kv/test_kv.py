"""KV calibration: what a layer's keys and values say, and what is chosen from that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from appliance.errors import CheckpointError
from appliance.kernels import arrays
from appliance.kernels.kv_format import KVFormat
from appliance.model.source import open_model
from appliance.model.spec import AttentionSpec, RopeSpec
from appliance.quant.formats.kv_plan import FILE, read_plan, to_json
from appliance.quant.kv.calibrate import (
    CHOICES,
    MEASURED,
    MeasuredLayer,
    bits_per_element,
    calibrate_kv,
    choose_formats,
    mean_bits,
    measure_layer,
)

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 32, 100


def measured(bias: float, *, softcap: float | None = None) -> MeasuredLayer:
    """A layer whose keys have a few channels far from zero, as those with a bias have."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(TOKENS, HEADS, DIM, generator=generator)
    key, value = torch.randn(2, TOKENS, KV_HEADS, DIM, generator=generator)
    key[..., ::8] += bias
    spec = AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        scale=DIM**-0.5,
        window=None,
        softcap=softcap,
        rope=RopeSpec(rotary_dim=DIM, theta=1e4),
    )
    energy = torch.ones(1, TOKENS)
    return measure_layer(spec, ([query], [key], [value]), lambda x: x, energy)


def test_fewer_bits_cost_more() -> None:
    errors = measured(0.0).errors
    order = [KVFormat.BF16, KVFormat.INT8, KVFormat.K8V4, KVFormat.INT4_SEALED, KVFormat.INT4]
    costs = [errors[form] for form in order]
    assert costs == sorted(costs)
    assert costs[0] < 1e-4


def test_a_huge_bias_of_the_keys_is_harmless_once_their_mean_is_off() -> None:
    plain, biased = measured(0.0), measured(600.0)
    for form in (KVFormat.INT8, KVFormat.INT4, KVFormat.FP8, KVFormat.K8V4):
        assert biased.errors[form] > 10 * plain.errors[form], "nothing was lost to begin with"
        assert biased.gains(form)
        assert biased.best(form) < 2 * plain.errors[form]
    torch.testing.assert_close(
        biased.key_mean[:, ::8], torch.full((KV_HEADS, 4), 600.0), atol=1.0, rtol=0
    )


def test_no_mean_is_taken_off_before_a_soft_cap() -> None:
    assert measured(600.0, softcap=30.0).centred == {}


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


def test_a_plan_comes_back_as_it_was_written(tiny_llama: Path, tmp_path: Path) -> None:
    rows = torch.randint(3, 512, (2, 64), generator=torch.Generator().manual_seed(0))
    plan = calibrate_kv(open_model(tiny_llama), rows, tmp_path, torch.device("cpu"), 7.0)
    assert plan.bits <= 7.0
    first = replace(plan.layers[0], key_factors=torch.arange(1.0, 33).view(2, 16))
    plan = replace(plan, layers=(first, *plan.layers[1:]))
    (tmp_path / FILE).write_text(json.dumps(to_json(plan.layers, plan.bits)))
    heads = [(2, 16), (2, 16)]
    read = read_plan(tmp_path, heads)
    assert read is not None
    for ours, theirs in zip(plan.layers, read, strict=True):
        assert ours.format is theirs.format
        assert ours.head_scales is not None
        assert theirs.head_scales is not None
        torch.testing.assert_close(ours.head_scales, arrays.in_torch(theirs.head_scales))
        assert (ours.key_mean is None) == (theirs.key_mean is None)
    assert read[0].key_factors is not None
    assert torch.equal(arrays.in_torch(read[0].key_factors), torch.arange(1.0, 33).view(2, 16))
    with pytest.raises(CheckpointError, match="of another model"):
        read_plan(tmp_path, heads[:1])
    with pytest.raises(CheckpointError, match="is damaged"):
        read_plan(tmp_path, [(2, 16), (3, 16)])
    (tmp_path / FILE).write_text('{"version": 2}')
    with pytest.raises(CheckpointError, match="newer appliance"):
        read_plan(tmp_path, heads)
