"""Columns cut from weights in every form equal those of the whole weight exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.gguf.ggml_weights import random_ggml
from support.kernels.fp4_weights import random_fp4
from support.kernels.packed_weights import random_packed

from appliance.kernels.weights.fp8 import Fp8Weight
from appliance.kernels.weights.ggml_types import GGML_TYPES
from appliance.kernels.weights.packed import OffsetKind
from appliance.kernels.weights.weight import column_unit, dense, some_columns

if TYPE_CHECKING:
    from appliance.kernels.weights.weight import Weight


def check(weight: Weight, first: int, last: int) -> Weight:
    unit = column_unit(weight)
    assert unit is not None
    assert first % unit == 0
    part = some_columns(weight, first, last)
    whole = dense(weight, torch.float32)
    assert part.shape == (whole.shape[0], last - first)
    assert torch.equal(dense(part, torch.float32), whole[:, first:last])
    return part


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", OffsetKind)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_packed(bits: int, kind: OffsetKind, group: int) -> None:
    weight = random_packed(5, 512, group, bits=bits, kind=kind)
    assert check(weight, 128, 384).group_size == group  # type: ignore[union-attr]
    if group > 32:
        assert check(weight, 32, 416).group_size == 32  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [name for name in GGML_TYPES if not name.startswith("MX")])
def test_ggml(name: str) -> None:
    size = GGML_TYPES[name].block_size
    check(random_ggml(name, 3, 4 * size), size, 3 * size)


@pytest.mark.parametrize("scale", [torch.float8_e8m0fnu, torch.float8_e4m3fn])
def test_fp4(scale: torch.dtype) -> None:
    check(random_fp4(5, 128, scale), 32, 96)


@pytest.mark.parametrize("blockwise", [True, False])
def test_fp8(blockwise: bool) -> None:
    codes = torch.randn(130, 300).to(torch.float8_e4m3fn)
    weight = Fp8Weight(codes, torch.rand(2, 3) if blockwise else torch.rand(130))
    check(weight, 128, 256)
    check(weight, 128, 300)


def test_fp8_keeps_its_blocks_where_rows_do_not_cut_them() -> None:
    codes = torch.randn(300, 200).to(torch.float8_e4m3fn)
    for weight in (Fp8Weight(codes, torch.rand(3, 2)), Fp8Weight(codes, torch.rand(300))):
        whole = weight.dequantize()
        for first, last in ((128, 256), (128, 300)):
            part = weight.rows(first, last)
            assert part is not None
            assert torch.equal(part.dequantize(), whole[first:last])
    assert Fp8Weight(codes, torch.rand(3, 2)).rows(64, 192) is None


def test_dense() -> None:
    check(torch.randn(3, 10), 1, 7)


def test_inputs_in_an_order_of_their_own_are_not_cut() -> None:
    weight = random_packed(4, 64, 32)
    order = torch.randperm(64).to(torch.int32)
    ordered = type(weight)(
        weight.codes, weight.scale, weight.offset, weight.offset_kind, 4, 32, order
    )
    assert column_unit(ordered) is None
