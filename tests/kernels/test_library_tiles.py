"""The CPU library's tiles, widened by another kernel, against the original weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.gguf.ggml_weights import random_ggml
from support.kernels.fp4_weights import random_fp4
from support.kernels.library_tiles import laid_out
from support.kernels.packed_weights import random_packed

from appliance.kernels.cpu.weights import GGML_FORMS
from appliance.kernels.library_tiles.reference import widen
from appliance.kernels.weights.packed import OffsetKind
from appliance.kernels.weights.weight import dense


def assert_widened(weight: Any, dtype: Any = torch.float32) -> None:
    tiles, arena = laid_out(weight, dtype=dtype)
    expected = dense(weight, torch.float32)
    assert tiles.codes.data_ptr()
    torch.testing.assert_close(widen(tiles, torch.float32), expected, rtol=1e-6, atol=1e-7)
    half = widen(tiles, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half, expected.bfloat16(), rtol=0.01, atol=1e-6)
    assert arena.nbytes >= tiles.codes.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_elements_keep_their_type(dtype: torch.dtype) -> None:
    assert_widened(torch.randn(50, 24).to(dtype), dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", OffsetKind)
@pytest.mark.parametrize("group", [32, 128])
def test_packed_weights_have_scales_and_offsets_of_groups(
    bits: int, kind: OffsetKind, group: int
) -> None:
    assert_widened(random_packed(50, 256, group, bits=bits, kind=kind))
    assert_widened(random_packed(50, 256, group, bits=bits, kind=kind, symmetric=True))


@pytest.mark.parametrize("form", [torch.float8_e8m0fnu, torch.float8_e4m3fn])
def test_four_bit_floats_have_powers_or_numbers_as_scales(form: torch.dtype) -> None:
    weight = random_fp4(50, 96, form)
    assert_widened(weight)
    assert_widened(replace(weight, row_scale=torch.ones(50)))


@pytest.mark.parametrize("name", GGML_FORMS)
def test_types_of_gguf_files_are_in_planes(name: str) -> None:
    assert_widened(random_ggml(name, 50, 768))


def test_columns_return_to_the_order_of_the_inputs_and_a_bias_stays_beside() -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0)).int()
    weight = replace(random_packed(20, 256, 32), input_order=order)
    assert_widened(weight)
    bias = torch.randn(20)
    tiles, arena = laid_out(weight, bias)
    assert arena.nbytes
    assert tiles.bias is not None
    assert torch.equal(tiles.bias, bias)
