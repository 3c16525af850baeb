"""Models with experts through `quantize`: each expert is rounded, routers are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.teacher_forcing import logits_of
from transformers import AutoConfig, AutoModelForCausalLM

from appliance.kernels.backend import REFERENCE
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.weights.packed import PackedWeight
from appliance.model.loader import load_decoder
from appliance.model.native_loader import load_native
from appliance.model.source import open_model
from appliance.model.tensors import Role
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods import rtn
from appliance.quant.run.options import Method, QuantizeOptions
from appliance.quant.run.pipeline import quantize_model

SCHEME = WeightScheme(4, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = AutoConfig.for_model(
        "glm4_moe",
        vocab_size=60,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.rand_like(buffer))
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def test_experts_are_rounded_and_routers_are_not(folder: Path, tmp_path: Path) -> None:
    report = quantize_model(folder, tmp_path / "out", QuantizeOptions(SCHEME, Method.RTN))
    source, result = open_model(folder), open_model(report.out)
    experts = routers = 0
    for slot in source.slots():
        before, after = source.weights.load(slot.name), result.weights.load(slot.name)
        assert isinstance(before, torch.Tensor)
        if slot.role is Role.ROUTER:
            assert isinstance(after, torch.Tensor)
            assert torch.equal(before.to(after.dtype), after)
            assert after.dtype in (before.dtype, torch.float32)
            routers += 1
        elif slot.is_linear:
            assert isinstance(after, PackedWeight), slot.name
            assert torch.equal(after.dequantize(), rtn.quantize(before, SCHEME).dequantize())
            experts += slot.expert is not None
    assert (experts, routers) == (4 * 3, 2)
    assert "model.layers.1.mlp.gate" in result.config["quantization_config"]["ignore"]


SIZES = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}
EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
OTHERS = {
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma4": (
        "gemma4_text",
        EXPERTS | {"enable_moe_block": True, "hidden_size_per_layer_input": 0},
    ),
    "gemma4-small": (
        "gemma4_text",
        {
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 60,
        },
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_decides_and_what_tokens_add_stay_as_they_are(case: str, tmp_path: Path) -> None:
    model_type, settings = OTHERS[case]
    config = AutoConfig.for_model(model_type, **SIZES | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    report = quantize_model(tmp_path / "base", tmp_path / "out", QuantizeOptions(SCHEME))
    source, result = open_model(tmp_path / "base"), open_model(report.out)
    for slot in source.slots():
        before, after = source.weights.load(slot.name), result.weights.load(slot.name)
        assert isinstance(before, torch.Tensor)
        assert isinstance(after, PackedWeight) == slot.is_linear, slot.name
        if isinstance(after, PackedWeight):
            after = after.dequantize()
            before = rtn.quantize(before, SCHEME).dequantize()
        assert isinstance(after, torch.Tensor)
        assert torch.equal(before.to(after.dtype), after), slot.name
    tokens = list(range(3, 40))
    exact = load_decoder(result, REFERENCE, torch.device("cpu"), torch.float32)
    native = load_native(result, NativeEngine(load_library(), 1), torch.float32)
    expected, found = logits_of(exact, tokens), logits_of(native, tokens)
    errors = (found - expected).pow(2).mean(dim=-1).sqrt() / expected.std()
    # Activations are rounded; an untrained Gemma 4 does not scale its scores.
    assert errors.median() < (0.03 if case == "gpt_oss" else 0.1), errors
