"""The int8 matmul without a launch: where a card gains by it, how inputs are rounded."""

from __future__ import annotations

import pytest
import torch

from appliance.kernels.gpu.residency import LARGEST
from appliance.kernels.int8_matmul.reference import dequantize_inputs, quantize_inputs
from appliance.kernels.int8_matmul.tiles import (
    PROVEN,
    has_fast_int8,
    int8_clocks,
    int8_tile,
    is_faster,
    usual_clocks,
)
from appliance.kernels.packed_matmul.slices import LinearForm
from appliance.kernels.packed_matmul.tiled import Codes, Params
from appliance.kernels.packed_matmul.tiles import ROW_STEP
from appliance.kernels.weight_codes.order import TileOrder


def form(
    out_features: int,
    in_features: int,
    params_kind: Params = Params.FP16_ZERO,
    group_size: int = 128,
    kind: Codes = Codes.INT4,
) -> LinearForm:
    nbytes = out_features * in_features * (kind.bits + 32 / group_size) / 8
    return LinearForm(
        out_features, in_features, in_features // 128, 128, int(nbytes), kind, params_kind,
        group_size,
    )  # fmt: skip


GATE_UP = form(28672, 4096)


@pytest.mark.parametrize("capability", PROVEN)
@pytest.mark.parametrize("rows", [64, 128, 512, 2048])
def test_large_linears_gain_and_by_no_more_than_the_tensor_cores(
    capability: int, rows: int
) -> None:
    place = capability, LARGEST[capability]
    assert is_faster(GATE_UP, rows // ROW_STEP, *place)
    gain = usual_clocks(GATE_UP, rows // ROW_STEP, *place) / int8_clocks(GATE_UP, rows, *place)
    assert 1.3 < gain <= 4


@pytest.mark.parametrize(
    ("one", "steps", "capability"),
    [
        (GATE_UP, 1, 86),
        (form(28672, 4096, kind=Codes.INT8, params_kind=Params.FP32), 16, 86),
        (form(28672, 4096, Params.IQ4_XS, 32, Codes.IQ4), 16, 86),
        (GATE_UP, 16, 80),
        (GATE_UP, 16, 90),
        (GATE_UP, 16, 100),
    ],
    ids=["few rows", "8 bits", "values of a table", "A100", "H100", "B200"],
)
def test_others_are_multiplied_in_16_bits(one: LinearForm, steps: int, capability: int) -> None:
    card = LARGEST[max(known for known in LARGEST if known <= capability)]
    assert not is_faster(one, steps, capability, card)


def test_cards_with_fast_products_of_int8() -> None:
    assert [each for each in (80, 86, 87, 89, 90, 100, 120, 121) if has_fast_int8(each)] == [
        86, 87, 89, 120, 121,
    ]  # fmt: skip


def test_a_number_of_rows_alone_chooses_the_splits() -> None:
    assert {int8_tile(rows).max_rows for rows in range(1, 513)} == {64, 128, 256, 512}
    assert int8_tile(513) == int8_tile(544)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_an_input_moves_by_half_a_step_at_most(group_size: int) -> None:
    x = torch.randn(20, 300, generator=torch.Generator().manual_seed(group_size))
    codes, scale = quantize_inputs(x, group_size)
    steps = scale.double().repeat_interleave(group_size, 1)[:, :300]
    near = dequantize_inputs(codes, scale, 300)
    assert ((near.double() - x.double()).abs() <= steps * (0.5 + 1e-5)).all()
    assert (codes.unflatten(1, (-1, group_size)).abs().amax(2) == 127).all()
    assert not codes[:, 300:].any()


def test_groups_with_what_is_not_finite_are_nan_and_others_are_not() -> None:
    x = torch.ones(3, 96)
    x[1, 40], x[2, 95] = torch.nan, -torch.inf
    codes, scale = quantize_inputs(x, 32)
    assert scale.isnan().tolist() == [[False] * 3, [False, True, False], [False, False, True]]
    assert not dequantize_inputs(codes, scale, 96)[1, 32:64].isfinite().any()


def test_words_hold_the_codes_of_fragments_in_the_ptx_manual() -> None:
    """A lane's register has four neighbours of one row: figure of `mma.m16n8k32`, operand A."""
    order = TileOrder(4)
    n, k = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    rows, inputs = (order.pack(codes.to(torch.uint8) % 16) for codes in (n, k))
    high = order.pack((k // 16).to(torch.uint8))
    for lane in range(128):
        warp, group, place = lane // 32, lane % 32 // 4, lane % 4
        for word in range(4):
            words = [int(each[4 * lane + word]) for each in (rows, inputs, high)]
            row, low, upper = ([w >> 4 * i & 15 for i in range(8)] for w in words)
            for second in range(2):
                # Nibbles of bytes 0 and 2, or 1 and 3: low ones first.
                nibbles = [2 * (second + 2 * j0) + j1 for j1 in range(2) for j0 in range(2)]
                assert {row[i] for i in nibbles} == {(group + 8 * second) % 16}
                places = [16 * word + 4 * place + i for i in range(4)]
                stored = [upper[i] * 16 + low[i] for i in nibbles]
                assert stored == [place_to_input(one) for one in places], (warp, lane, word)


def place_to_input(place: int) -> int:
    """The inverse of `kernel.in_order`."""
    return place & ~15 | place & 1 | (place >> 1 & 6) | (place << 2 & 8)
