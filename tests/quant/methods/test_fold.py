"""Scales of inputs leave no trace in what a layer computes, whatever family it belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from appliance.model.source import open_model
from appliance.quant.methods import fold
from appliance.quant.methods.sensitivity import Variants
from appliance.quant.scheme import WeightScheme

SCHEME = WeightScheme(4, 32, symmetric=False)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 60,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},  # biases of query, key and value
    "qwen3": {},  # norms of heads
    "gemma3_text": {"query_pre_attn_scalar": 16},  # norms about 1 and after each part
    "phi3": {"pad_token_id": 0},  # fused weights
}


def make_folder(family: str, folder: Path) -> Path:
    config: Any = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_computes_the_same_with_scaled_inputs(family: str, tmp_path: Path) -> None:
    source = open_model(make_folder(family, tmp_path))
    rows = torch.randint(0, 60, (4, 40), generator=torch.Generator().manual_seed(1))
    variants = Variants(source, rows)
    for index, layer in enumerate(source.spec.layers):
        block = variants.block(index)
        moments = variants.observe(block)
        before = [linear.weight.clone() for linear in block.linears()]
        expected = variants.branch(block)
        chosen = fold.scale_inputs(block, moments, [SCHEME] * 4, torch.bfloat16, layer.norm.offset)
        assert any(scales.exponent > 0 for scales in chosen)
        changed = [
            not torch.equal(old, linear.weight)
            for old, linear in zip(before, block.linears(), strict=True)
        ]
        assert any(changed)
        torch.testing.assert_close(variants.branch(block), expected, rtol=1e-4, atol=1e-4)
        stored = block.attention_norm.weight - layer.norm.offset
        assert torch.equal(stored, stored.bfloat16().float()), "as it will be stored"
        variants.advance(variants.block(index))
