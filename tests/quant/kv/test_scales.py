"""FP8 scales move to where attention has the least error, for each head separately."""

from __future__ import annotations

import torch

from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.model.spec import AttentionSpec, RopeSpec
from appliance.quant.kv.attention import EVERY, attend_with, largest_scales, search_scales

HEADS, DIM, TOKENS = 2, 32, 64
SPEC = AttentionSpec(
    num_heads=2 * HEADS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    scale=DIM**-0.5,
    window=None,
    softcap=None,
    rope=RopeSpec(rotary_dim=DIM, theta=1e4),
)


def test_only_the_head_that_gains_is_shifted() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(TOKENS // EVERY, 2 * HEADS, DIM, generator=generator)
    key = torch.randn(TOKENS, HEADS, DIM, generator=generator)
    value = torch.randn(TOKENS, HEADS, DIM, generator=generator).sign()  # exact at the largest
    value[0, 1, 0] = 1.21  # now 1 is inexact: it lies in the middle between two steps
    row = query, key, value
    exact = attend_with(SPEC, LayerPrecision(KVFormat.FP32), *row)
    before = torch.stack([largest_scales(key), largest_scales(value)])
    after = search_scales(SPEC, [row], [exact], before, part=1)
    assert torch.equal(after[0], before[0])
    assert after[1, 0] == before[1, 0]
    assert before[1, 1] < after[1, 1] < 2 * before[1, 1]

    def error(scales: torch.Tensor) -> torch.Tensor:
        lost = attend_with(SPEC, LayerPrecision(KVFormat.FP8, scales), *row) - exact
        by_head: torch.Tensor = lost.unflatten(1, (HEADS, -1)).square().sum((0, 2))
        return by_head

    assert error(after)[0] == error(before)[0]
    assert error(after)[1] < 0.5 * error(before)[1]
    both = search_scales(SPEC, [row], [exact], after, part=0)
    assert (error(both) <= error(after)).all()
