"""Factors that even out keys are chosen where they help, and leave the model's function alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from support.models.lora import write_adapter
from support.models.model_families import write_family
from support.models.teacher_forcing import logits_of

from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.weights.weight import dense
from appliance.model.adapters.reader import read_adapter
from appliance.model.adapters.targets import adapter_targets
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.model.spec import AttentionSpec, NormSpec, RopeSpec
from appliance.quant.formats.kv_plan import KVLayer
from appliance.quant.kv.attention import EVERY, attend_with
from appliance.quant.kv.calibrate import measure_layer
from appliance.quant.kv.even_keys import even, with_even_keys
from appliance.quant.run.adapter_factors import write_adapter_factors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 32, 100
SIZES = {"q": 64, "k": 32, "v": 32}  # outputs of the tiny model's linears
SPEC = AttentionSpec(
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=DIM,
    scale=DIM**-0.5,
    window=None,
    softcap=None,
    rope=RopeSpec(rotary_dim=DIM, theta=1e4),
)


def seen(outlier: float) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Data of one row of text; a pair of the keys' channels is larger than the others."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(TOKENS, HEADS, DIM, generator=generator)
    key, value = torch.randn(2, TOKENS, KV_HEADS, DIM, generator=generator)
    key[..., [3, 3 + DIM // 2]] *= outlier
    query[..., [3, 3 + DIM // 2]] /= outlier
    return [query], [key], [value]


def factors_of(spec: AttentionSpec, outlier: float) -> Tensor | None:
    energy = torch.ones(1, TOKENS)
    return measure_layer(spec, seen(outlier), lambda x: x, energy).key_factors


def test_a_pair_of_large_channels_shares_a_large_factor() -> None:
    factors = factors_of(SPEC, 20.0)
    assert factors is not None
    half = DIM // 2
    assert torch.equal(factors[:, :half], factors[:, half:]), "RoPE would mix unlike channels"
    others = torch.cat((factors[:, :3], factors[:, 4:half]), dim=1)
    assert bool((factors[:, 3] > 3 * others.amax(1)).all())


def test_even_keys_cost_less_in_eight_bits_and_nothing_without() -> None:
    factors = factors_of(SPEC, 20.0)
    assert factors is not None
    (query,), (key,), (value,) = seen(20.0)
    row = query[::EVERY], key, value
    (evened,) = even([row], factors)
    exact = attend_with(SPEC, LayerPrecision(KVFormat.FP32), *row)
    torch.testing.assert_close(attend_with(SPEC, LayerPrecision(KVFormat.FP32), *evened), exact)
    eight = LayerPrecision(KVFormat.INT8)
    before, after = (
        float((attend_with(SPEC, eight, *one) - exact).square().mean()) for one in (row, evened)
    )
    assert after < before / 2


def test_where_nothing_is_gained_there_are_no_factors() -> None:
    assert factors_of(SPEC, 1.0) is None
    normed = replace(SPEC, qk_norm=NormSpec(eps=1e-6))
    assert factors_of(normed, 20.0) is None, "its heads share the weight of their norm"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", ["llama", "ernie4_5"])  # the latter rotates neighbours
def test_a_model_with_factors_in_its_weights_says_the_same(
    family: str, tmp_path: Path, seed: int
) -> None:
    """This includes an adapter of the original, to which the factors are applied."""
    source = open_model(write_family(family, tmp_path / "base"))
    half = 2 ** torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
    layer = KVLayer(
        format=KVFormat.INT8,
        head_scales=torch.ones(2, 2),
        plain_scales=torch.ones(2, 2),
        key_mean=None,
        errors={},
        key_factors=torch.cat((half, half), dim=1),
    )
    layers = [layer, replace(layer, key_factors=None)]
    evened = replace(with_even_keys(source, layers), path=tmp_path)
    write_adapter_factors(source, (), layers, tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    changed, original = (dense(of.weights.load(name), torch.float32) for of in (evened, source))
    assert not torch.equal(changed, original)
    ids = list(range(3, 40))
    shapes = {f"model.layers.0.self_attn.{key}_proj": (size, 64) for key, size in SIZES.items()}
    adapter = write_adapter(tmp_path / "adapter", shapes, spread=0.2)
    found = []
    for of in (evened, source):
        decoder = load_decoder(of, REFERENCE, torch.device("cpu"), torch.float32)
        slots = decoder.adapter_slots(adapter_targets(of.spec, of.family.names), 1, 64)
        slots.put(0, slots.lay_out(read_adapter(adapter, of, 16)))
        found.append([logits_of(decoder, ids), logits_of(decoder, ids, adapters=slots)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert float((found[1][0] - found[1][1]).abs().max()) > 0.1, "an adapter that says something"


def test_a_plan_without_factors_leaves_the_model_as_it_is(tiny_llama: Path) -> None:
    source = open_model(tiny_llama)
    assert with_even_keys(source, []) is source
