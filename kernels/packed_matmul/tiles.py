"""Tiles of the packed matmul: one table, by compute capability and rows of x.

Computed, not timed: from compiled code (registers, instructions per weight) and from the bytes that
must be in flight; `gpu.timed` corrects it on a card. The number of rows of x picks an entry, and
shape and card the splits of a weight, so a row's result is the same in every batch of one entry.
Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.kernels.gpu.residency import Multiprocessors

T = TypeVar("T")

TILE_N = 64
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
LEAST_BLOCKS = 4  # of a split; fewer do not fill the pipeline
OVERHEAD_BLOCKS = 3  # cost of starting and ending a program, in blocks
# Up to so many rows of x a weight is read at the speed of memory, so its splits must write and
# read back little beside it.
MEMORY_BOUND_ROWS = 32
PARTIAL_SHARE = 0.25  # of a weight's bytes, at most
WORKSPACE_FLOATS = 4 << 20  # partial sums of all programs of a launch
MAX_COUNTERS = 1 << 14
SHORT_GROUP = 32
WHOLE = 1 << 30
ROW_STEP = 32  # of x, in which a choice for many rows changes


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """Tile, warps and stages of one program."""

    max_rows: int  # of x, at most
    block_m: int  # rows of x
    block_n: int  # output features
    num_warps: int
    num_stages: int
    tilewise: bool = False  # a product for each stored tile, else for each group
    max_registers: int | None = None  # per thread; None leaves the choice to ptxas
    folds: bool = False  # weights take scale and offset before the product


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table."""

    tiles: tuple[MatmulTile, ...]  # by max_rows; the last also for more
    one_sum: tuple[MatmulTile, ...]  # where all products add to one sum
    short_groups: tuple[MatmulTile, ...]  # above the rows of SHORT_GROUP_TILES
    # Bytes that an SM must have in flight: its share of the bandwidth on the fastest card's data
    # sheet, times 0.8 us, about the latency of a loaded memory.
    bytes_in_flight: int


# All warps lie along the weight's rows, so no code is widened twice. The compiler arranges that
# for few rows of x; for more only if several products follow one another and a load of codes spans
# the same rows as the warps: hence one product per stored tile. A cap on registers keeps ptxas
# from saving some at the cost of instructions or spills.
# Up to 16 rows two warps on 64 features are best: each has two fragments of weights for one of x
# and 2.1 to 2.9 instructions per weight, where four warps have 2.5 to 3.9. From 33 rows on eight
# warps, as float32 sums fill the registers of four, except with wgmma.
# With many rows, codes must be widened while the tensor cores multiply. By mma.sync a warp widens
# some between its products. A warpgroup waits for wgmma, so another program must fill that time:
# two fit where there is one sum and no second for the product of a group.
_SKINNY = (
    MatmulTile(8, 8, 64, 2, 4),
    MatmulTile(16, 16, 64, 2, 4),
    MatmulTile(32, 32, 128, 4, 3, tilewise=True),
)
_MMA_SYNC = (
    *_SKINNY,
    MatmulTile(128, 64, 128, 8, 3, tilewise=True, max_registers=168),
    MatmulTile(512, 64, 128, 8, 3, tilewise=True, max_registers=168),
)
_WGMMA = (
    *_SKINNY,
    MatmulTile(64, 64, 128, 4, 3, tilewise=True),
    MatmulTile(128, 128, 128, 8, 3, tilewise=True),
    MatmulTile(256, 128, 128, 8, 3, tilewise=True),
)
_WIDE = MatmulTile(512, 128, 128, 8, 2, tilewise=True, max_registers=128, folds=True)
_WGMMA_ONE_SUM = (
    *_WGMMA[:4],
    replace(_WIDE, max_rows=128),
    replace(_WIDE, max_rows=256),
    _WIDE,
)
# A scale every 32 inputs costs a multiplication for each sum, and registers that taller tiles lack:
# with many rows of x the weights take it.
SHORT_GROUP_TILES = (
    replace(_SKINNY[0], max_registers=128),
    *_SKINNY[1:],
    replace(_SKINNY[2], max_rows=128),
)
_SHORT_MMA_SYNC = (replace(_MMA_SYNC[-1], folds=True),)
_SHORT_WGMMA = (replace(_WIDE, max_rows=256), _WIDE)
ARCHITECTURES = {
    80: Architecture(_MMA_SYNC, _MMA_SYNC, _SHORT_MMA_SYNC, 15 << 10),
    86: Architecture(_MMA_SYNC, _MMA_SYNC, _SHORT_MMA_SYNC, 9 << 10),
    89: Architecture(_MMA_SYNC, _MMA_SYNC, _SHORT_MMA_SYNC, 9 << 10),
    90: Architecture(_WGMMA, _WGMMA_ONE_SUM, _SHORT_WGMMA, 29 << 10),
    120: Architecture(_MMA_SYNC, _MMA_SYNC, _SHORT_MMA_SYNC, 9 << 10),
}


@lru_cache(maxsize=64)
def architecture(capability: int) -> Architecture | None:
    """Return the row of a compute capability (86 is 8.6) or the one before it; None below 8.0."""
    known = [elder for elder in ARCHITECTURES if elder <= capability]
    # Architectures after Hopper without wgmma, such as consumer Blackwell, take the newest table.
    return ARCHITECTURES[120 if capability > 90 else max(known)] if known else None


@lru_cache(maxsize=4096)
def choose_tile(
    rows: int, capability: int, group_size: int = 128, *, may_fold: bool = False
) -> MatmulTile:
    """Choose the tile for a number of rows of x; with many, `slices` may decide against it.

    Args:
        rows: of x.
        capability: compute capability (86 is 8.6).
        group_size: inputs of one scaled product; 0 means all; WHOLE too, by the tiles of groups.
        may_fold: weights can take scale and offset before the product, see `variant.may_fold`.
    """
    tiles = tiles_of(capability, group_size, may_fold=may_fold)
    tile = next((tile for tile in tiles if rows <= tile.max_rows), None)
    if tile is None:
        return replace(tiles[-1], max_rows=-(-rows // ROW_STEP) * ROW_STEP)
    # With one sum over all inputs ptxas would spill, to fit more programs than shared memory holds.
    one_sum = group_size in (0, WHOLE)
    return replace(tile, max_registers=128) if tile is _SKINNY[1] and one_sum else tile


def tiles_of(capability: int, group_size: int, *, may_fold: bool) -> tuple[MatmulTile, ...]:
    """Return the table of a kind of weights, see `choose_tile`."""
    table = architecture(capability)
    assert table is not None
    if 0 < group_size <= SHORT_GROUP:
        return *SHORT_GROUP_TILES, *table.short_groups
    return table.one_sum if may_fold or not group_size else table.tiles


def neighbours(own: T, table: Sequence[T]) -> tuple[T, ...]:
    """Return one of a table, then those beside it."""
    place = table.index(own)
    return (own, *table[max(place - 1, 0) : place], *table[place + 1 : place + 2])


@dataclass(frozen=True, slots=True)
class TileDevice:
    """The device that executes a tile's programs.

    Attributes:
        capability: compute capability (86 is 8.6).
        card: the GPU.
        resident: programs that an SM executes at a time.
    """

    capability: int
    card: Multiprocessors
    resident: int


@lru_cache(maxsize=4096)
def choose_splits(
    out_tiles: int, blocks_k: int, block_bytes: int, tile: MatmulTile, place: TileDevice
) -> int:
    """Choose the number of programs that share an output tile's inputs.

    Args:
        out_tiles: tiles of TILE_N output features.
        blocks_k: blocks of inputs.
        block_bytes: codes of one block of inputs for TILE_N features.
    """
    table = architecture(place.capability)
    assert table is not None
    programs = _programs(out_tiles, tile)
    num_sms = place.card.num_sms
    ahead = (tile.num_stages - 1) * block_bytes * (tile.block_n // TILE_N)
    wanted = min(place.resident, -(-table.bytes_in_flight // ahead))  # programs of an SM

    def cost(splits: int) -> float:
        each = -(-blocks_k // splits) + OVERHEAD_BLOCKS * (1 if splits == 1 else 2)
        # Too few programs leave memory idle; with more, the busiest SM sets the time.
        per_sm = programs * splits / num_sms
        return -(-programs * splits // num_sms) * each * max(1.0, wanted / per_sm)

    return min(fitting_splits(out_tiles, blocks_k, block_bytes, tile), key=cost)


@lru_cache(maxsize=4096)
def fitting_splits(
    out_tiles: int, blocks_k: int, block_bytes: int, tile: MatmulTile
) -> tuple[int, ...]:
    """Return the numbers of splits that the workspace holds and that write little beside codes."""
    programs = _programs(out_tiles, tile)

    def fits(splits: int) -> bool:
        if splits == 1:
            return True
        floats = programs * splits * tile.block_n * tile.block_m
        enough = blocks_k // splits >= LEAST_BLOCKS
        if floats > WORKSPACE_FLOATS or programs > MAX_COUNTERS or not enough:
            return False
        is_little = partial_share(blocks_k, block_bytes, tile, splits) <= PARTIAL_SHARE
        return is_little or tile.max_rows > MEMORY_BOUND_ROWS

    return tuple(filter(fits, SPLITS))


def _programs(out_tiles: int, tile: MatmulTile) -> int:
    return -(-out_tiles * TILE_N // tile.block_n) * -(-tile.max_rows // tile.block_m)


def partial_share(blocks_k: int, block_bytes: int, tile: MatmulTile, splits: int) -> float:
    """Return the bytes that splits write and read back, as a share of the weight's codes."""
    return 2 * 4 * splits * tile.block_m * TILE_N / (blocks_k * block_bytes)
