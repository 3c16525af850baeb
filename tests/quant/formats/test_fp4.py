"""Folders of 4-bit floats: which ones are read, and how the others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.kernels.weights.fp4 import Fp4Weight
from appliance.model_files.checkpoint import SafetensorsFolder
from appliance.quant.formats import open_weights

FolderOf = Callable[[dict[str, Tensor], object], SafetensorsFolder]
MODULE = "model.layers.0.mlp.up_proj"
NAME = MODULE + ".weight"
# The numbers of OCP's table, by code.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
RANDOM = torch.Generator().manual_seed(0)
ROWS, INPUTS = 6, 64
CODES = torch.randint(0, 256, (ROWS, INPUTS // 2), generator=RANDOM).to(torch.uint8)
POWERS = torch.randint(120, 131, (ROWS, INPUTS // 32), generator=RANDOM).to(torch.uint8)
FINE = (torch.rand(ROWS, INPUTS // 16, generator=RANDOM) * 300 + 1).to(torch.float8_e4m3fn)

MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def packed(form: str, group_size: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": group_size}
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
    }


NVFP4 = packed("nvfp4-pack-quantized", 16)
MXFP4 = packed("mxfp4-pack-quantized", 32)


def expected(codes: Tensor, factor: Callable[[int, int], float]) -> Tensor:
    """The values, element by element, by the two standards."""
    rows, inputs = codes.shape[0], 2 * codes.shape[1]
    out = torch.empty(rows, inputs)
    for row in range(rows):
        for k in range(inputs):
            nibble = int(codes[row, k // 2]) >> (4 * (k % 2)) & 15
            out[row, k] = E2M1[nibble] * factor(row, k)
    return out


def tensors(**parts: Tensor) -> dict[str, Tensor]:
    named = {f"{MODULE}.{key}": part for key, part in parts.items()}
    return {"lm_head.weight": torch.ones(3, INPUTS).bfloat16(), **named}


@pytest.mark.parametrize(
    ("parts", "config", "factor"),
    [
        (
            {"weight": CODES, "weight_scale_2": torch.tensor(0.01), "input_scale": torch.ones(1)},
            MODELOPT,
            0.01,
        ),
        (
            {
                "weight_packed": CODES,
                "weight_global_scale": torch.tensor([100.0]),
                "input_global_scale": torch.ones(1),
            },
            NVFP4,
            0.01,
        ),
    ],
    ids=["modelopt", "compressed-tensors"],
)
def test_nvfp4(
    parts: dict[str, Tensor], config: dict[str, Any], factor: float, folder_of: FolderOf
) -> None:
    reader = open_weights(folder_of(tensors(**parts, weight_scale=FINE), config))
    assert reader.tensor_names() == ["lm_head.weight", NAME]
    assert reader.shape(NAME) == (ROWS, INPUTS)
    assert (reader.float_bits(NAME), reader.float_bits("lm_head.weight")) == (4, None)
    assert reader.packed_bits(NAME) is None
    loaded = reader.load(NAME)
    assert isinstance(loaded, Fp4Weight)
    exact = expected(CODES, lambda row, k: float(FINE[row, k // 16]) * factor)
    torch.testing.assert_close(loaded.dequantize(), exact, rtol=1e-6, atol=0)
    assert isinstance(reader.load("lm_head.weight"), Tensor)


def test_mxfp4_by_module(folder_of: FolderOf) -> None:
    parts = tensors(weight_packed=CODES, weight_scale=POWERS)
    loaded = open_weights(folder_of(parts, MXFP4)).load(NAME)
    assert isinstance(loaded, Fp4Weight)
    exact = expected(CODES, lambda row, k: 2.0 ** (int(POWERS[row, k // 32]) - 127))
    assert torch.equal(loaded.dequantize(), exact)


def test_mxfp4_by_expert(folder_of: FolderOf) -> None:
    experts = "model.layers.0.mlp.experts"
    blocks = torch.stack((CODES, CODES.flip(0))).view(2, ROWS, INPUTS // 32, 16)
    parts = {
        f"{experts}.gate_up_proj_blocks": blocks,
        f"{experts}.gate_up_proj_scales": torch.stack((POWERS, POWERS.flip(0))),
        f"{experts}.gate_up_proj_bias": torch.ones(2, ROWS).bfloat16(),
    }
    reader = open_weights(folder_of(parts, GPT_OSS))
    names = [f"{experts}.{expert}.gate_up_proj.weight" for expert in range(2)]
    assert reader.tensor_names() == [*names, f"{experts}.gate_up_proj_bias"]
    assert [reader.shape(name) for name in names] == [(ROWS, INPUTS)] * 2
    first, second = (reader.load(name) for name in names)
    assert isinstance(first, Fp4Weight)
    assert isinstance(second, Fp4Weight)
    exact = expected(CODES, lambda row, k: 2.0 ** (int(POWERS[row, k // 32]) - 127))
    assert torch.equal(first.dequantize(), exact)
    assert torch.equal(second.dequantize(), exact.flip(0))


NAN = torch.full_like(POWERS, 255)


@pytest.mark.parametrize(
    ("parts", "config", "complaint"),
    [
        ({"weight_packed": CODES}, MXFP4, "up_proj.weight_scale is missing"),
        ({"weight_packed": CODES, "weight_scale": POWERS[:1]}, MXFP4, "scales of .1, 2."),
        ({"weight_packed": CODES, "weight_scale": POWERS.float()}, MXFP4, "of torch.float32"),
        ({"weight_packed": CODES, "weight_scale": NAN}, MXFP4, "a scale that is NaN"),
        (
            {"weight": CODES, "weight_scale": FINE, "weight_scale_2": torch.zeros(1)},
            MODELOPT,
            "a scale of the whole weight of .0.0.",
        ),
        ({"weight": CODES, "weight_scale": FINE}, MODELOPT, "weight_scale_2 is missing"),
    ],
)
def test_damaged_parts_are_refused_by_name(
    parts: dict[str, Tensor], config: dict[str, Any], complaint: str, folder_of: FolderOf
) -> None:
    reader = open_weights(folder_of(tensors(**parts), config))
    with pytest.raises(CheckpointError, match=complaint):
        reader.load(NAME)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MODELOPT | {"group_size": 32}, "NVFP4 in groups of 32"),
        (packed("mxfp4-pack-quantized", 16), "MXFP4 in groups of 16"),
    ],
)
def test_other_variants_are_refused_with_what_is_supported(
    config: dict[str, Any], named: str, folder_of: FolderOf
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{named}; supported are MXFP4"):
        open_weights(folder_of(tensors(), config))
