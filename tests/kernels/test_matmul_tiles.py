from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from support.kernels.compiled_kernels.signatures.packed_matmul import SHAPES, MatmulShape

from appliance.kernels.fp8_matmul.launch import choose_fp8_tile
from appliance.kernels.gpu.residency import LARGEST
from appliance.kernels.packed_matmul.tiled import Codes, Params
from appliance.kernels.packed_matmul.tiles import (
    ARCHITECTURES,
    LEAST_BLOCKS,
    MAX_COUNTERS,
    MEMORY_BOUND_ROWS,
    SHORT_GROUP_TILES,
    TILE_N,
    WORKSPACE_FLOATS,
    MatmulTile,
    TileDevice,
    architecture,
    choose_splits,
    choose_tile,
)
from appliance.kernels.packed_matmul.variant import constexprs_of, may_fold, product_group

ODD = (
    MatmulShape("one block", 64, 8),
    MatmulShape("vocabulary", 576, 262144),
    MatmulShape("deep", 65536, 64),
)


BLOCK_BYTES = {4: 128 * TILE_N // 2, 8: 128 * TILE_N}  # of 128 inputs


def places(tile: MatmulTile, capability: int) -> list[TileDevice]:
    """Cards from small to large, with several numbers of resident programs."""
    largest = LARGEST[capability]
    return [
        TileDevice(capability, replace(largest, num_sms=num_sms), resident)
        for num_sms in (20, largest.num_sms // 3, largest.num_sms)
        for resident in (1, 3, 5, 16)
    ]


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("shape", [*SHAPES, *ODD], ids=lambda shape: shape.name)
@pytest.mark.parametrize("bits", [4, 8])
def test_splits_fit_the_workspace_and_their_traffic_a_share(
    capability: int, shape: MatmulShape, bits: int
) -> None:
    table = architecture(capability)
    assert table is not None
    out_tiles, blocks_k = -(-shape.out_features // TILE_N), -(-shape.in_features // 128)
    tiles = [*table.tiles, *table.one_sum, *SHORT_GROUP_TILES, *table.short_groups]
    tiles += [choose_fp8_tile(rows, capability) for rows in (1, 64, 4096)]
    for tile in tiles:
        for place in places(tile, capability):
            splits = choose_splits(out_tiles, blocks_k, BLOCK_BYTES[bits], tile, place)
            if splits == 1:
                continue
            assert blocks_k // splits >= LEAST_BLOCKS
            out = -(-out_tiles * TILE_N // tile.block_n) * -(-tile.max_rows // tile.block_m)
            assert out <= MAX_COUNTERS
            assert out * splits * tile.block_m * tile.block_n <= WORKSPACE_FLOATS
            if tile.max_rows <= MEMORY_BOUND_ROWS:
                moved = 2 * 4 * splits * out * tile.block_m * tile.block_n
                weight = -(-out_tiles * TILE_N // tile.block_n) * tile.block_n
                assert moved <= 0.25 * weight * blocks_k * 128 * bits / 8


def splits_of(inputs: int, outputs: int, rows: int, place: TileDevice) -> int:
    tile = choose_tile(rows, place.capability)
    return choose_splits(outputs // TILE_N, inputs // 128, BLOCK_BYTES[4], tile, place)


def test_small_weights_are_split_and_large_ones_hardly() -> None:
    place = TileDevice(90, LARGEST[90], resident=5)
    assert splits_of(14336, 4096, 1, place) >= 4
    assert splits_of(4096, 28672, 1, place) <= 2


def test_a_small_card_takes_fewer_splits_than_a_large_one() -> None:
    rtx_4090, rtx_4060 = (replace(LARGEST[89], num_sms=num_sms) for num_sms in (128, 24))
    large, small = (
        [splits_of(4096, 4096, rows, TileDevice(89, card, resident=5)) for rows in (1, 16)]
        for card in (rtx_4090, rtx_4060)
    )
    assert all(few < many for few, many in zip(small, large, strict=True)), (small, large)


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_every_number_of_rows_has_a_tile_of_its_own_height(capability: int) -> None:
    table = architecture(capability)
    assert table is not None
    for smaller, larger in itertools.pairwise(table.tiles):
        assert smaller.max_rows < larger.max_rows
        assert smaller.block_m <= larger.block_m
    for tile in table.tiles:
        assert choose_tile(tile.max_rows, capability) is tile
        assert tile.block_n % TILE_N == 0
    last = table.tiles[-1]
    assert choose_tile(1000, capability) == replace(last, max_rows=1024)
    for tile in table.one_sum:
        assert choose_tile(tile.max_rows, capability, may_fold=True) is tile
    assert choose_tile(16, capability, 32) is choose_tile(16, capability, 64)
    assert choose_tile(128, capability, 32) is SHORT_GROUP_TILES[-1]
    assert choose_tile(129, capability, 32) is table.short_groups[0]
    assert choose_tile(513, capability, 32) == replace(table.short_groups[-1], max_rows=544)


@pytest.mark.parametrize(
    ("capability", "rows", "kind", "group_size", "expected"),
    [
        (90, 65, Codes.INT4, 128, 128),
        (90, 512, Codes.INT4, 64, 64),
        (90, 64, Codes.INT4, 128, 0),
        (90, 128, Codes.INT4, 32, 0),
        (90, 129, Codes.INT4, 32, 32),
        (86, 129, Codes.INT6, 16, 16),
        (90, 128, Codes.INT8, 128, 0),
        (90, 512, Codes.FP4, 16, 0),
        (86, 128, Codes.INT4, 128, 0),
        (120, 512, Codes.INT4, 128, 0),
    ],
)
def test_weights_take_their_scale_on_hopper_with_many_rows_and_long_groups(
    capability: int, rows: int, kind: Codes, group_size: int, expected: int
) -> None:
    form = kind, group_size
    tile = choose_tile(rows, capability, product_group(*form), may_fold=may_fold(*form))
    params = Params.HALVES if kind is Codes.FP4 else Params.FP32
    fixed = constexprs_of(kind, params, group_size, 128, tile)
    assert fixed["FOLDED"] == expected
    assert (fixed["GROUP"] == 0) == (expected > 0 or kind is Codes.FP4)


@pytest.mark.parametrize(
    ("capability", "like"), [(75, None), (87, 86), (100, 120), (103, 120), (121, 120)]
)
def test_other_gpus_take_the_table_of_a_relative(capability: int, like: int | None) -> None:
    assert architecture(capability) is (None if like is None else ARCHITECTURES[like])
