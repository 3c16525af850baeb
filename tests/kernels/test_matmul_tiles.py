from __future__ import annotations

import itertools

import pytest
from compiled_kernels.signatures.packed_matmul import SHAPES, MatmulShape

from appliance.kernels.fp8_matmul.tiles import choose_fp8_tile
from appliance.kernels.packed_matmul.tiles import (
    ARCHITECTURES,
    LEAST_BLOCKS,
    MAX_COUNTERS,
    SHORT_GROUP_TILES,
    TILE_N,
    WORKSPACE_FLOATS,
    architecture,
    choose_splits,
    choose_tile,
)

ODD = (
    MatmulShape("one block", 64, 8),
    MatmulShape("vocabulary", 576, 262144),
    MatmulShape("deep", 65536, 64),
)


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("shape", [*SHAPES, *ODD], ids=lambda shape: shape.name)
def test_splits_fit_the_workspace(capability: int, shape: MatmulShape) -> None:
    table = architecture(capability)
    assert table is not None
    out_tiles, blocks_k = -(-shape.out_features // TILE_N), -(-shape.in_features // 128)
    for tile in (
        *table.tiles,
        *SHORT_GROUP_TILES,
        *(choose_fp8_tile(rows, capability) for rows in (1, 64, 4096)),
    ):
        splits = choose_splits(out_tiles, blocks_k, tile, capability)
        if splits == 1:
            continue
        assert blocks_k // splits >= LEAST_BLOCKS
        most_rows = tile.max_rows
        out = -(-out_tiles * TILE_N // tile.block_n) * -(-most_rows // tile.block_m)
        assert out <= MAX_COUNTERS
        assert out * splits * tile.block_m * tile.block_n <= WORKSPACE_FLOATS


def test_small_weights_are_split_and_large_ones_hardly() -> None:
    few = choose_tile(1, 90)
    assert few is not None
    down, gate_up = ((14336, 4096), (4096, 28672))
    splits = [choose_splits(n // TILE_N, k // 128, few, 90) for k, n in (down, gate_up)]
    assert splits[0] >= 4
    assert splits[1] <= 2


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_every_number_of_rows_has_a_tile_until_weights_are_made_dense(capability: int) -> None:
    table = architecture(capability)
    assert table is not None
    for smaller, larger in itertools.pairwise(table.tiles):
        assert smaller.max_rows < larger.max_rows
        assert smaller.block_m <= larger.block_m
    for tile in table.tiles:
        assert choose_tile(tile.max_rows, capability) is tile
        assert tile.block_n % TILE_N == 0
    assert choose_tile(table.tiles[-1].max_rows + 1, capability) is None
    assert choose_tile(16, capability, 32) is choose_tile(16, capability, 64)
    assert choose_tile(128, capability, 32) is not None
    assert choose_tile(129, capability, 32) is None


@pytest.mark.parametrize(
    ("capability", "like"), [(75, None), (87, 86), (100, 120), (103, 120), (121, 120)]
)
def test_other_gpus_take_the_table_of_a_relative(capability: int, like: int | None) -> None:
    assert architecture(capability) is (None if like is None else ARCHITECTURES[like])
