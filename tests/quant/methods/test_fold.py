"""Folded input scales do not change what a layer computes, in any family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.model_families import FAMILIES, write_family

from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods import awq
from appliance.quant.methods.sensitivity import Variants

SCHEME = WeightScheme(4, 32, symmetric=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_computes_the_same_with_scaled_inputs(family: str, tmp_path: Path) -> None:
    source = open_model(write_family(family, tmp_path))
    rows = torch.randint(0, 60, (4, 40), generator=torch.Generator().manual_seed(1))
    variants = Variants(source, rows)
    for index, layer in enumerate(source.spec.layers):
        block = variants.block(index)
        moments = variants.observe(block)
        before = [linear.weight.clone() for linear in block.linears()]
        expected = variants.branch(block)
        chosen = awq.scale_inputs(block, moments, [SCHEME] * 4, torch.bfloat16, layer.norm.offset)
        assert any(scales.exponent > 0 for scales in chosen)
        changed = [
            not torch.equal(old, linear.weight)
            for old, linear in zip(before, block.linears(), strict=True)
        ]
        assert any(changed)
        torch.testing.assert_close(variants.branch(block), expected, rtol=1e-4, atol=1e-4)
        stored = block.mixer_norm.weight - layer.norm.offset
        assert torch.equal(stored, stored.bfloat16().float()), "as it will be stored"
        variants.advance(variants.block(index))
