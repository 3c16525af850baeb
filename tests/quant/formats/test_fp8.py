"""Folders of FP8 weights: which ones are read, and how the others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.quant.formats import open_weights

FolderOf = Callable[[dict[str, Tensor], object], SafetensorsFolder]
MODULE = "model.layers.0.mlp.up_proj"
NAME = MODULE + ".weight"
RANDOM = torch.Generator().manual_seed(0)
CODES = torch.randn(200, 160, generator=RANDOM).to(torch.float8_e4m3fn)
BLOCKS = torch.rand(2, 2, generator=RANDOM)
FINE: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}


def tensors(**parts: Tensor) -> dict[str, Tensor]:
    named = {f"{MODULE}.{key}": part for key, part in parts.items()}
    return {NAME: CODES, "lm_head.weight": torch.ones(3, 160).bfloat16(), **named}


def test_blocks_multiply_their_codes(folder_of: FolderOf) -> None:
    reader = open_weights(folder_of(tensors(weight_scale_inv=BLOCKS), FINE))
    assert reader.tensor_names() == ["lm_head.weight", NAME]
    assert reader.shape(NAME) == (200, 160)
    assert (reader.float_bits(NAME), reader.float_bits("lm_head.weight")) == (8, None)
    assert reader.packed_bits(NAME) is None
    loaded = reader.load(NAME)
    assert isinstance(loaded, Fp8Weight)
    assert loaded.quantized_inputs
    dense = loaded.dequantize()
    for row, column in ((0, 0), (127, 128), (128, 127), (199, 159)):
        expected = float(CODES[row, column]) * float(BLOCKS[row // 128, column // 128])
        assert float(dense[row, column]) == pytest.approx(expected, rel=1e-6)
    assert isinstance(reader.load("lm_head.weight"), Tensor)


def test_powers_of_two_are_scales_too(folder_of: FolderOf) -> None:
    powers = torch.tensor([[0.5, 2.0], [4.0, 0.125]]).to(torch.float8_e8m0fnu)
    loaded = open_weights(folder_of(tensors(weight_scale_inv=powers), FINE)).load(NAME)
    assert isinstance(loaded, Fp8Weight)
    assert loaded.scale.tolist() == [[0.5, 2.0], [4.0, 0.125]]


@pytest.mark.parametrize(
    "scale", [torch.tensor(0.25), torch.tensor([0.25]), torch.full((200, 1), 0.25)]
)
@pytest.mark.parametrize(
    "config", [FINE | {"weight_block_size": None, "activation_scheme": "static"}, MODELOPT]
)
def test_one_scale_for_a_tensor_or_a_row(
    scale: Tensor, config: dict[str, Any], folder_of: FolderOf
) -> None:
    parts = tensors(weight_scale=scale, input_scale=torch.tensor(1.0))
    reader = open_weights(folder_of(parts, config))
    assert reader.tensor_names() == ["lm_head.weight", NAME]
    loaded = reader.load(NAME)
    assert isinstance(loaded, Fp8Weight)
    assert not loaded.quantized_inputs  # we do not use static scales of activations
    assert torch.equal(loaded.dequantize(), CODES.float() * 0.25)


def test_modelopt_may_quantize_the_kv_cache_alone(folder_of: FolderOf) -> None:
    dense = {NAME: CODES.bfloat16()}
    reader = open_weights(folder_of(dense, MODELOPT | {"quant_algo": None}))
    assert reader.float_bits(NAME) is None
    assert torch.equal(reader.load(NAME), dense[NAME])  # type: ignore[arg-type]
    assert not reader.notes()


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({}, "up_proj.weight_scale_inv is missing"),
        ({"weight_scale_inv": BLOCKS[:1]}, "weight_scale_inv has shape"),
        ({"weight_scale_inv": BLOCKS * torch.inf}, "weight_scale_inv holds NaN"),
        ({"weight_scale_inv": BLOCKS.int()}, "weight_scale_inv has type torch.int32"),
    ],
)
def test_damaged_scales_are_refused_by_name(
    parts: dict[str, Tensor], complaint: str, folder_of: FolderOf
) -> None:
    reader = open_weights(folder_of(tensors(**parts), FINE))
    with pytest.raises(CheckpointError, match=complaint):
        reader.load(NAME)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (FINE | {"fmt": "e5m2"}, "numbers in 'e5m2'"),
        (FINE | {"weight_block_size": [64, 64]}, r"blocks of \[64, 64\]"),
        (FINE | {"activation_scheme": "odd"}, "activation_scheme 'odd'"),
        (MODELOPT | {"quant_algo": "INT4"}, "quant_algo 'INT4'"),
    ],
)
def test_other_variants_are_refused_with_what_is_supported(
    config: dict[str, Any], named: str, folder_of: FolderOf
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{named}; supported are e4m3"):
        open_weights(folder_of(tensors(weight_scale_inv=BLOCKS), config))
