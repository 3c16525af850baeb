"""Write a checkpoint of a known shape with random weights, for speed only.

All layers hold the same numbers, which are made once; on the disk and in memory each has its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.weights.packed import PackedWeight
from appliance.model.tensors import Role, TensorSlot, tensor_slots
from appliance.model_files.checkpoint import write_safetensors
from appliance.quant.formats.compressed_tensors import encode
from appliance.quant.formats.compressed_tensors_config import quantization_config
from bench.lib.families import family_of_config
from bench.lib.synthetic import Schemes, random_weight

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.quant.formats.scheme import WeightScheme


def write_checkpoint(folder: Path, config: dict[str, Any], schemes: Schemes) -> None:
    """Write config.json and one file for each layer into a new folder."""
    family = family_of_config(config)
    slots = tensor_slots(family.spec(config), family.names)
    parts: dict[str, list[TensorSlot]] = {}
    for slot in slots:
        layer = slot.name.rpartition(".layers.")[2].split(".")[0]
        parts.setdefault(layer, []).append(slot)
    make = _Maker(schemes)
    folder.mkdir(parents=True)
    index: dict[str, str] = {}
    for number, members in enumerate(parts.values(), start=1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        tensors = {key: value for slot in members for key, value in make(slot).items()}
        write_safetensors(folder / name, tensors)
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    chosen = {slot.name.removesuffix(".weight"): schemes.of(slot) for slot in slots}
    packed = {name: scheme for name, scheme in chosen.items() if scheme is not None}
    dense = [
        slot.name.removesuffix(".weight")
        for slot in slots
        if (slot.is_linear or slot.role is Role.HEAD) and schemes.of(slot) is None
    ]
    extra = {"quantization_config": quantization_config(packed, dense)} if packed else {}
    text = json.dumps({**config, "torch_dtype": "bfloat16", **extra}, indent=2)
    (folder / "config.json").write_text(text)


class _Maker:
    """Makes one tensor of each shape and scheme, and copies it."""

    def __init__(self, schemes: Schemes) -> None:
        self._schemes = schemes
        self._generator = torch.Generator().manual_seed(0)
        self._made: dict[tuple[tuple[int, ...], WeightScheme | None], Tensor | PackedWeight] = {}

    def __call__(self, slot: TensorSlot) -> dict[str, Tensor]:
        scheme = self._schemes.of(slot)
        key = (slot.shape, scheme)
        if key not in self._made:
            self._made[key] = random_weight(slot.shape, scheme, self._generator, torch.bfloat16)
        value = self._made[key]
        if not isinstance(value, PackedWeight):
            return {slot.name: value.clone()}
        assert scheme is not None
        stored = encode(slot.name, value, scheme)
        return {name: part.clone() for name, part in stored.items()}
