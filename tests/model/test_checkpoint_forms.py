"""Models whose weights others quantized: every executor computes what the dense weights say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.checkpoint import write_safetensors
from appliance.kernels.backend import CPU, REFERENCE
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.fp8 import BLOCK, Fp8Weight
from appliance.kernels.packed import PackedWeight
from appliance.model.layers import GatedLinear
from appliance.model.linear import SideBySide
from appliance.model.loader import load_decoder
from appliance.model.native_loader import load_native
from appliance.model.size import estimate_native_bytes, estimate_weight_bytes
from appliance.model.source import ModelSource, open_model
from appliance.model.teacher import logits_of
from appliance.quant.formats import awq, compressed_tensors, gptq
from appliance.quant.formats.awq import AwqLayout
from appliance.quant.formats.compressed_tensors_config import quantization_config
from appliance.quant.formats.gptq import V1, V2, GptqLayout
from appliance.quant.formats.pack import bytes_to_words, pack_codes, unpack_codes, words_to_bytes
from appliance.quant.formats.scheme import Fp8Scheme, WeightScheme
from appliance.quant.formats.word_packed import G_IDX, QWEIGHT
from appliance.quant.methods import rtn

DEVICE = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (192, 128),
    "mlp.up_proj": (192, 128),
    "mlp.down_proj": (128, 192),
}
Stored = dict[str, Tensor]
Quantize = Callable[[str, Tensor], tuple[Stored, Tensor]]  # parts by suffix, and the dense weight


@dataclass(frozen=True)
class Form:
    """How a test's checkpoint stores its linears."""

    config: dict[str, Any]
    quantize: Quantize
    weight_format: str


def in_awq(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    packed = rtn.quantize(weight, WeightScheme(4, 64, symmetric=False), torch.float16)
    return AwqLayout(64).encode(name, packed), packed.dequantize()


def in_gptq(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    packed = rtn.quantize(weight, WeightScheme(8, 32, symmetric=True), torch.float16)
    return GptqLayout(8, 32, V1).encode(name, packed), packed.dequantize()


def in_act_order(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """Every input of a layer has an order, but the value projection one of its own."""
    packed = rtn.quantize(weight, WeightScheme(4, 64, symmetric=False), torch.float16)
    parts = GptqLayout(4, 64, V2).encode(name, packed)
    seed = 1 if "v_proj" in name else weight.shape[1]
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(seed))
    codes = unpack_codes(words_to_bytes(parts[QWEIGHT].T.contiguous(), weight.shape[1] // 2), 4)
    parts[QWEIGHT] = bytes_to_words(pack_codes(codes[:, order], 4)).T.contiguous()
    parts[G_IDX] = parts[G_IDX][order]
    return parts, packed.dequantize()[:, order]


def in_fp8(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    dense = torch.empty(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            scale[i, j] = weight[block].abs().max() / 448
            codes[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
            dense[block] = codes[block].float() * scale[i, j]
    return {".weight": codes, ".weight_scale_inv": scale}, dense


def in_channel_fp8(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    scale = (weight.abs().amax(dim=1) / 448).bfloat16().float()
    codes = (weight / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    fp8 = Fp8Weight(codes, scale)
    parts = compressed_tensors.encode(name + ".weight", fp8, Fp8Scheme())
    return {key.removeprefix(name): part for key, part in parts.items()}, fp8.dequantize()


FORMS = {
    "fp8-channel": Form(
        quantization_config({"model.layers.0.mlp.up_proj": Fp8Scheme()}, ["lm_head"]),
        in_channel_fp8,
        "fp8 (held as fp32)",
    ),
    "awq": Form(
        awq.quantization_config(AwqLayout(64), ["lm_head"]), in_awq, "4 bits (groups of 64)"
    ),
    "gptq": Form(
        gptq.quantization_config(GptqLayout(8, 32, V1), []), in_gptq, "8 bits (groups of 32)"
    ),
    "act-order": Form(
        gptq.quantization_config(GptqLayout(4, 64, V2), []) | {"desc_act": True},
        in_act_order,
        "4 bits (groups of 64)",
    ),
    "fp8": Form(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        in_fp8,
        "fp8 (held as fp32)",
    ),
}


def write(folder: Path, tensors: Stored, quantization: dict[str, Any] | None) -> ModelSource:
    folder.mkdir()
    config = CONFIG if quantization is None else CONFIG | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return open_model(folder)


def write_both(path: Path, form: Form) -> tuple[ModelSource, ModelSource]:
    """A quantized model, and one with the weights that it stands for, dense."""
    random = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, gain: float = 1.5) -> Tensor:
        return torch.randn(rows, columns, generator=random).mul(gain * columns**-0.5)

    quantized = {
        "model.embed_tokens.weight": matrix(97, 128, 12),
        "lm_head.weight": matrix(97, 128),
        "model.norm.weight": torch.ones(128),
    }
    dense = dict(quantized)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            quantized[f"{prefix}{norm}.weight"] = dense[f"{prefix}{norm}.weight"] = torch.ones(128)
        for name, shape in SHAPES.items():
            parts, weight = form.quantize(prefix + name, matrix(*shape))
            quantized |= {prefix + name + suffix: part for suffix, part in parts.items()}
            dense[f"{prefix}{name}.weight"] = weight
    return write(path / "quantized", quantized, form.config), write(path / "dense", dense, None)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


def test_logits_are_those_of_the_dense_weights(
    form: Form, tmp_path: Path, token_ids: list[int]
) -> None:
    quantized, dense = write_both(tmp_path, form)
    expected = logits_of(load_decoder(dense, REFERENCE, DEVICE, torch.float32), token_ids)
    assert expected.std() > 0.5  # a model that says something
    decoder = load_decoder(quantized, REFERENCE, DEVICE, torch.float32)
    torch.testing.assert_close(logits_of(decoder, token_ids), expected, atol=1e-4, rtol=0)
    assert decoder.weight_format == f"{form.weight_format}, head fp32"
    native = load_native(quantized, NativeEngine(load_library(), 2), torch.float32)
    found = logits_of(native, token_ids)
    share = float((found - expected).norm() / expected.norm())
    assert share < (1e-5 if form.weight_format.startswith("fp8") else 0.04)  # inputs of 8 bits
    assert native.weight_bytes <= estimate_native_bytes(quantized, torch.float32) * 1.05
    held = load_decoder(quantized, CPU, DEVICE, torch.bfloat16)
    assert held.weight_bytes <= estimate_weight_bytes(quantized, DEVICE, torch.bfloat16) * 1.05
    share = float((logits_of(held, token_ids) - expected).norm() / expected.norm())
    assert share < 0.05


def test_orders_of_their_own_stand_side_by_side(tmp_path: Path) -> None:
    source, _ = write_both(tmp_path, FORMS["act-order"])
    decoder = load_decoder(source, REFERENCE, DEVICE, torch.float32)
    qkv = decoder.layers[0].attention.qkv
    assert isinstance(qkv, SideBySide)
    assert [part.out_features for part in qkv.parts] == [192, 64]  # the value has another order
    gated = decoder.layers[0].mlp.gated
    assert isinstance(gated, GatedLinear)
    assert not isinstance(gated.gate_up, SideBySide)
    weight = source.weights.load("model.layers.0.self_attn.q_proj.weight")
    assert isinstance(weight, PackedWeight)
    assert weight.input_order is not None


def test_a_gpu_holds_fp8_weights_in_a_byte_each(tmp_path: Path) -> None:
    source, dense = write_both(tmp_path, FORMS["fp8"])
    gpu = torch.device("cuda")
    saved = estimate_weight_bytes(dense, gpu, torch.bfloat16)
    saved -= estimate_weight_bytes(source, gpu, torch.bfloat16)
    linears = 2 * sum(rows * columns for rows, columns in SHAPES.values())
    assert 0.95 * linears < saved < linears
    assert estimate_weight_bytes(source, gpu, torch.float32) == estimate_weight_bytes(
        dense, gpu, torch.float32
    )
