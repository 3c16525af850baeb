"""Tiles of the packed matmul: one table, by compute capability and rows of x.

Chosen from compiled code (registers, instructions per weight) and from the bytes that must be in
flight; none has been timed on a GPU yet. The width in rows of x alone picks an entry, and the
split of a weight follows from its shape and the card, so a row's result is the same in any batch
of one entry. Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.kernels.residency import Multiprocessors

TILE_N = 64
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
LEAST_BLOCKS = 4  # of a split: fewer would not fill the pipeline
OVERHEAD_BLOCKS = 3  # what starting and ending a program costs, in blocks
# Rows of x up to which a weight is read at the speed of memory: what its splits leave and read
# again must be little beside it.
MEMORY_BOUND_ROWS = 32
PARTIAL_SHARE = 0.25  # of a weight's bytes
WORKSPACE_FLOATS = 4 << 20  # partial sums of all programs of a launch
MAX_COUNTERS = 1 << 14
SHORT_GROUP = 32


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """Tile, warps and stages of one program."""

    max_rows: int  # of x, that it is chosen for
    block_m: int  # rows of x
    block_n: int  # output features
    num_warps: int
    num_stages: int
    tilewise: bool = False  # a product for each stored tile, else for each group
    max_registers: int | None = None  # per thread; None leaves the choice to ptxas


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table."""

    tiles: tuple[MatmulTile, ...]  # by max_rows; above the last, weights are made dense
    # Bytes that an SM must have on their way: its share of the card's bandwidth, from the data
    # sheet of the fastest, in 0.8 us, which is about what a loaded memory takes to answer.
    bytes_in_flight: int


# All warps stand along the weight's rows, so that none widens what another has widened. The
# compiler does that for few rows of x; for more only where several products follow one another,
# and where a load of codes spans the same rows as the warps: hence one product per stored tile.
# Where a cap on registers stands, ptxas would else save some at the cost of instructions or spills.
# Up to 16 rows two warps on 64 features are best: each has two fragments of weights for one of x,
# which leaves 2.1 to 2.9 instructions per weight where four warps take 2.5 to 3.9. From 33 rows on
# eight warps, for sums in float32 fill the registers of four, except with wgmma.
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
# A scale every 32 inputs costs a multiplication for each sum: with many rows of x more than making
# the weight dense, and registers that taller tiles do not have.
SHORT_GROUP_TILES = (
    replace(_SKINNY[0], max_registers=128),
    *_SKINNY[1:],
    replace(_SKINNY[2], max_rows=128),
)
ARCHITECTURES = {
    80: Architecture(_MMA_SYNC, 15 << 10),
    86: Architecture(_MMA_SYNC, 9 << 10),
    89: Architecture(_MMA_SYNC, 9 << 10),
    90: Architecture(_WGMMA, 29 << 10),
    120: Architecture(_MMA_SYNC, 9 << 10),
}


@lru_cache(maxsize=64)
def architecture(capability: int) -> Architecture | None:
    """Return the row of a compute capability (86 is 8.6) or its predecessor; None below 8.0."""
    known = [elder for elder in ARCHITECTURES if elder <= capability]
    # What follows Hopper without wgmma, down to consumer Blackwell, takes the newest table.
    return ARCHITECTURES[120 if capability > 90 else max(known)] if known else None


@lru_cache(maxsize=4096)
def choose_tile(rows: int, capability: int, group_size: int = 128) -> MatmulTile | None:
    """Choose the tile for a number of rows of x; None means to dequantize the weight."""
    table = architecture(capability)
    assert table is not None
    tiles = SHORT_GROUP_TILES if 0 < group_size <= SHORT_GROUP else table.tiles
    tile = next((tile for tile in tiles if rows <= tile.max_rows), None)
    # One sum over all inputs: ptxas would spill to fit more programs than shared memory holds.
    return replace(tile, max_registers=128) if tile is _SKINNY[1] and not group_size else tile


@dataclass(frozen=True, slots=True)
class Place:
    """The device that executes a tile's programs.

    Attributes:
        capability: compute capability (86 is 8.6).
        card: the GPU.
        resident: programs that one of its SMs executes at a time.
    """

    capability: int
    card: Multiprocessors
    resident: int


@lru_cache(maxsize=4096)
def choose_splits(
    out_tiles: int, blocks_k: int, block_bytes: int, tile: MatmulTile, place: Place
) -> int:
    """Choose among how many programs an output tile's inputs are divided.

    Args:
        out_tiles: tiles of TILE_N output features.
        blocks_k: blocks of inputs.
        block_bytes: codes of one block of inputs for TILE_N features.
    """
    table = architecture(place.capability)
    assert table is not None
    programs = -(-out_tiles * TILE_N // tile.block_n) * -(-tile.max_rows // tile.block_m)
    num_sms = place.card.num_sms
    ahead = (tile.num_stages - 1) * block_bytes * (tile.block_n // TILE_N)
    wanted = min(place.resident, -(-table.bytes_in_flight // ahead))  # programs of an SM

    def cost(splits: int) -> float:
        each = -(-blocks_k // splits) + OVERHEAD_BLOCKS * (1 if splits == 1 else 2)
        # Too few programs leave memory idle; beyond that, the busiest SM sets the time.
        per_sm = programs * splits / num_sms
        return -(-programs * splits // num_sms) * each * max(1.0, wanted / per_sm)

    def fits(splits: int) -> bool:
        if splits == 1:
            return True
        floats = programs * splits * tile.block_n * tile.block_m
        enough = blocks_k // splits >= LEAST_BLOCKS
        if floats > WORKSPACE_FLOATS or programs > MAX_COUNTERS or not enough:
            return False
        is_little = partial_share(blocks_k, block_bytes, tile, splits) <= PARTIAL_SHARE
        return is_little or tile.max_rows > MEMORY_BOUND_ROWS

    return min(filter(fits, SPLITS), key=cost)


def partial_share(blocks_k: int, block_bytes: int, tile: MatmulTile, splits: int) -> float:
    """Return the bytes that splits write and read again, as a share of the weight's codes."""
    return 2 * 4 * splits * tile.block_m * TILE_N / (blocks_k * block_bytes)
