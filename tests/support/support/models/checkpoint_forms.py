"""Small models whose weights others quantized, beside the dense weights they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from appliance.kernels.weights.fp8 import BLOCK, Fp8Weight
from appliance.model.source import ModelSource, open_model
from appliance.model_files.checkpoint import write_safetensors
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


INT8 = WeightScheme(8, 64, symmetric=True)


def in_int8(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    packed = rtn.quantize(weight, INT8, torch.float16)
    parts = compressed_tensors.encode(name + ".weight", packed, INT8)
    return {key.removeprefix(name): part for key, part in parts.items()}, packed.dequantize()


THREE = WeightScheme(3, 64, symmetric=False)


def in_three(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    packed = rtn.quantize(weight, THREE, torch.float16)
    parts = compressed_tensors.encode(name + ".weight", packed, THREE)
    return {key.removeprefix(name): part for key, part in parts.items()}, packed.dequantize()


def in_two(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """GPTQ's symmetric form, all of whose zero points are 2."""
    groups = weight.view(weight.shape[0], -1, 32)
    scale = (groups.abs().amax(-1) / 2).half()
    codes = (groups / scale.float().unsqueeze(-1) + 2).round().clamp(0, 3)
    words = (codes.view(weight.shape[0], -1, 16).long() << torch.arange(0, 32, 2)).sum(-1)
    zeros = torch.full((groups.shape[1], weight.shape[0] // 16), 0x55555555, dtype=torch.int32)
    in_words = torch.from_numpy(words.numpy().astype("uint32").view("int32")).T.contiguous()
    stored = {".qweight": in_words, ".qzeros": zeros, ".scales": scale.T.contiguous()}
    return stored, ((codes - 2) * scale.float().unsqueeze(-1)).view(weight.shape)


def in_auto_round(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """AutoRound's symmetric form: the sign of a scale is that of its group's largest weight."""
    groups = weight.view(weight.shape[0], -1, 32)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = (-largest / 8).half()  # the largest weight has code 0
    codes = (groups / scale.float() + 8).round().clamp(0, 15)
    dense = ((codes - 8) * scale.float()).view(weight.shape)
    shifts = torch.arange(0, 32, 4)
    words = (codes.view(weight.shape[0], -1, 8).long() << shifts).sum(-1)
    zeros = torch.full((groups.shape[1], weight.shape[0] // 8), 0x77777777, dtype=torch.int32)
    in_words = torch.from_numpy(words.numpy().astype("uint32").view("int32")).T.contiguous()
    stored = {".qweight": in_words, ".qzeros": zeros, ".scales": scale.squeeze(-1).T.contiguous()}
    return stored, dense


def in_bytes(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """W8A8 of compressed-tensors: signed codes of a byte each."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale.float()


def in_either_float(name: str, weight: Tensor) -> tuple[Stored, Tensor]:
    """ModelOpt's mixed precision: FP8 in attention, NVFP4 in the MLP."""
    if "self_attn" in name:
        whole = weight.abs().max() / 448
        e4m3 = (weight / whole).to(torch.float8_e4m3fn)
        stored = {".weight": e4m3, ".weight_scale": whole, ".input_scale": torch.tensor(0.5)}
        return stored, e4m3.float() * whole
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    groups = weight.view(weight.shape[0], -1, 16)
    whole = weight.abs().max() / (6 * 448)
    scale = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    factor = scale.float()[..., None] * whole
    index = ((groups.abs() / factor)[..., None] - values).abs().argmin(-1)
    dense = (values[index] * factor * groups.sign()).view(weight.shape)
    codes = (index + 8 * (groups < 0)).view(weight.shape).byte()
    stored = {".weight": codes[:, ::2] | codes[:, 1::2] << 4, ".weight_scale": scale}
    return stored | {".weight_scale_2": whole}, dense


MIXED = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"model.layers.{layer}.{name}": {
            "quant_algo": "FP8" if "self_attn" in name else "W4A16_NVFP4"
        }
        for layer in range(2)
        for name in SHAPES
    },
    "producer": {"name": "modelopt"},
}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "frozen",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
        }
    },
}
FORMS = {
    "auto-round": Form(
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": 32,
            "sym": True,
        },
        in_auto_round,
        "4 bits (groups of 32)",
    ),
    "w8a8": Form(W8A8, in_bytes, "8 bits (a scale per row)"),
    "mixed": Form(MIXED, in_either_float, "fp8 (held as fp32) + nvfp4 (held as fp32)"),
    "int8": Form(
        quantization_config({"model.layers.0.mlp.up_proj": INT8}, ["lm_head"]),
        in_int8,
        "8 bits (groups of 64)",
    ),
    "3-bit": Form(
        quantization_config({"model.layers.0.mlp.up_proj": THREE}, ["lm_head"]),
        in_three,
        "4 bits (groups of 64)",
    ),
    "2-bit": Form(
        gptq.quantization_config(GptqLayout(2, 32, V1), []), in_two, "4 bits (groups of 32)"
    ),
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
