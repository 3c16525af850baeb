"""Writes a checkpoint of a known shape with random weights: for speed, never for text.

All layers hold the same numbers, which are made once; on the disk and in memory each has its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.checkpoint import write_safetensors
from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.model.families.registry import family_of_config
from appliance.model.tensors import Role, TensorSlot, tensor_slots
from appliance.quant.formats.compressed_tensors import encode
from appliance.quant.formats.compressed_tensors_config import quantization_config

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.quant.formats.scheme import WeightScheme

# https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json
LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,  # of the cache's memory, not of the arithmetic
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
TINY: dict[str, Any] = {
    **LLAMA_3_8B,
    "hidden_size": 256,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
}


def write_checkpoint(
    folder: Path, config: dict[str, Any], layers: WeightScheme | None, head: WeightScheme | None
) -> None:
    """Write config.json and one file for each layer.

    Args:
        folder: is made.
        config: of the model.
        layers: of the linears of all layers; None leaves them in bf16.
        head: of the last linear, likewise.
    """
    family = family_of_config(config)
    slots = tensor_slots(family.spec(config), family.names)
    parts: dict[str, list[TensorSlot]] = {}
    for slot in slots:
        layer = slot.name.rpartition(".layers.")[2].split(".")[0]
        parts.setdefault(layer, []).append(slot)
    make = _Maker(layers, head)
    folder.mkdir(parents=True)
    index: dict[str, str] = {}
    for number, members in enumerate(parts.values(), start=1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors = {key: value for slot in members for key, value in make(slot).items()}
        write_safetensors(folder / name, tensors)
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    schemes = {slot.name.removesuffix(".weight"): make.scheme(slot) for slot in slots}
    packed = {name: scheme for name, scheme in schemes.items() if scheme is not None}
    dense = [
        slot.name.removesuffix(".weight")
        for slot in slots
        if (slot.is_linear or slot.role is Role.HEAD) and make.scheme(slot) is None
    ]
    extra = {"quantization_config": quantization_config(packed, dense)} if packed else {}
    text = json.dumps({**config, "torch_dtype": "bfloat16", **extra}, indent=2)
    (folder / "config.json").write_text(text)


class _Maker:
    """Makes tensors; one of a shape and scheme is made once, and then copied."""

    def __init__(self, layers: WeightScheme | None, head: WeightScheme | None) -> None:
        self._layers, self._head = layers, head
        self._generator = torch.Generator().manual_seed(0)
        self._made: dict[tuple[tuple[int, ...], WeightScheme | None], Tensor | PackedWeight] = {}

    def scheme(self, slot: TensorSlot) -> WeightScheme | None:
        if slot.role is Role.HEAD:
            return self._head
        return self._layers if slot.is_linear else None

    def __call__(self, slot: TensorSlot) -> dict[str, Tensor]:
        scheme = self.scheme(slot)
        key = (slot.shape, scheme)
        if key not in self._made:
            self._made[key] = _random(slot.shape, scheme, self._generator)
        value = self._made[key]
        if not isinstance(value, PackedWeight):
            return {slot.name: value.clone()}
        assert scheme is not None
        stored = encode(slot.name, value, scheme)
        return {name: part.clone() for name, part in stored.items()}


def _random(
    shape: tuple[int, ...], scheme: WeightScheme | None, generator: torch.Generator
) -> Tensor | PackedWeight:
    """Small values, so that activations stay finite through all layers."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    rows, columns = shape
    if scheme is None:
        # `normal_` in bf16 at once: the float32 values of a head would take gigabytes
        out = torch.empty(shape, dtype=torch.bfloat16)
        return out.normal_(std=0.5 * columns**-0.5, generator=generator)
    group = scheme.group_size or columns
    codes = torch.randint(
        0, 256, (rows, columns * scheme.bits // 8), dtype=torch.uint8, generator=generator
    )
    scale = torch.full((rows, columns // group), columns**-0.5 / scheme.zero_code).bfloat16()
    if scheme.symmetric:
        offset, kind = -scheme.zero_code * scale, OffsetKind.ADDITIVE
    else:
        low, high = scheme.zero_code - 1, scheme.zero_code + 2
        offset = torch.randint(low, high, scale.shape, generator=generator).bfloat16()
        kind = OffsetKind.ZERO_POINT
    return PackedWeight(codes, scale, offset, kind, scheme.bits, group)
