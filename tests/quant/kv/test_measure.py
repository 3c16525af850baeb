"""The cost of KV formats for a layer."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from support.models.expert_models import save_experts

from appliance.kernels.cache.kv_format import KVFormat
from appliance.model.source import open_model
from appliance.model.spec import AttentionSpec, RopeSpec
from appliance.quant.kv.calibrate import MeasuredLayer, measure_kv, measure_layer
from appliance.quant.walk.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

    from appliance.quant.walk.block import TransformerBlock

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 32, 100


def measured(bias: float, *, softcap: float | None = None) -> MeasuredLayer:
    """A layer with a few key channels far from zero, as a bias causes."""
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


def test_experts_that_run_apart_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_experts("qwen3_moe", tmp_path / "model")
    source = open_model(tmp_path / "model")
    rows = torch.randint(0, 50, (3, 40), generator=torch.Generator().manual_seed(1))
    apart = measure_kv(source, rows, tmp_path / "apart", torch.device("cpu"))

    @contextmanager
    def whole(walk: Walk, index: int) -> Iterator[TransformerBlock]:
        yield walk.block(index)

    monkeypatch.setattr(Walk, "whole", whole)
    together = measure_kv(source, rows, tmp_path / "together", torch.device("cpu"))
    assert len(apart) == len(together) == 3
    for one, other in zip(apart, together, strict=True):
        torch.testing.assert_close(one.head_scales, other.head_scales)
        torch.testing.assert_close(one.key_mean, other.key_mean)
        torch.testing.assert_close(one.errors, other.errors, rtol=1e-3, atol=1e-9)
