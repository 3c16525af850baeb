"""What KV formats cost a layer."""

from __future__ import annotations

import torch

from appliance.kernels.kv_format import KVFormat
from appliance.model.spec import AttentionSpec, RopeSpec
from appliance.quant.kv.measure import MeasuredLayer, measure_layer

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
