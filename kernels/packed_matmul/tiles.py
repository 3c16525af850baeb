"""What each architecture multiplies at a time: one table, by compute capability and rows of x.

Chosen from compiled code (registers, instructions per weight) and from the bytes that must be in
flight; none has been timed on a GPU yet. The width in rows of x alone picks an entry, and the
split of a weight follows from its shape, so a row's result is the same in any batch of one entry.
Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

TILE_N = 64
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
LEAST_BLOCKS = 4  # of a split: fewer would not fill the pipeline
OVERHEAD_BLOCKS = 3  # what starting and ending a program costs, in blocks
WORKSPACE_FLOATS = 4 << 20  # partial sums of all programs of a launch
MAX_COUNTERS = 1 << 14
SHORT_GROUP = 32


@dataclass(frozen=True, slots=True)
class MatmulTile:
    """What a program works on at a time, and with what."""

    max_rows: int  # of x, that it is chosen for
    block_m: int  # rows of x
    block_n: int  # output features
    num_warps: int
    num_stages: int
    resident: int  # programs of an SM that keep memory busy
    tilewise: bool = False  # a product for each stored tile, else for each group
    max_registers: int | None = None  # per thread; None leaves the choice to ptxas


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table."""

    num_sms: int  # of its largest card
    tiles: tuple[MatmulTile, ...]  # by max_rows; above the last, weights are made dense


# All warps stand along the weight's rows, so that none widens what another has widened. The
# compiler does that for few rows of x; for more only where several products follow one another,
# and where a load of codes spans the same rows as the warps: hence one product per stored tile.
# Up to 16 rows two warps on 64 features are best: each has two fragments of weights for one of x,
# which leaves 2.1 to 2.9 instructions per weight where four warps take 2.5 to 3.9. From 33 rows on
# eight warps, for sums in float32 fill the registers of four, except with wgmma.
_SKINNY = (
    MatmulTile(8, 8, 64, 2, 4, resident=6),
    MatmulTile(16, 16, 64, 2, 4, resident=5),
    MatmulTile(32, 32, 128, 4, 3, resident=2, tilewise=True),
)
_MMA_SYNC = (
    *_SKINNY,
    MatmulTile(128, 64, 128, 8, 3, resident=1, tilewise=True, max_registers=168),
    MatmulTile(512, 64, 128, 8, 3, resident=1, tilewise=True, max_registers=168),
)
_WGMMA = (
    *_SKINNY,
    MatmulTile(64, 64, 128, 4, 3, resident=2, tilewise=True),
    MatmulTile(128, 128, 128, 8, 3, resident=1, tilewise=True),
    MatmulTile(256, 128, 128, 8, 3, resident=1, tilewise=True),
)
# A scale every 32 inputs costs a multiplication for each sum: with many rows of x more than making
# the weight dense, and registers that taller tiles do not have.
SHORT_GROUP_TILES = (*_SKINNY, replace(_SKINNY[2], max_rows=128))
ARCHITECTURES = {
    80: Architecture(108, _MMA_SYNC),
    86: Architecture(82, _MMA_SYNC),
    89: Architecture(128, _MMA_SYNC),
    90: Architecture(132, _WGMMA),
    120: Architecture(170, _MMA_SYNC),
}


@lru_cache(maxsize=64)
def architecture(capability: int) -> Architecture | None:
    """The row for a compute capability (86 is 8.6), of its nearest elder; None below 8.0."""
    known = [elder for elder in ARCHITECTURES if elder <= capability]
    # What follows Hopper without wgmma, down to consumer Blackwell, takes the newest table.
    return ARCHITECTURES[120 if capability > 90 else max(known)] if known else None


@lru_cache(maxsize=4096)
def choose_tile(rows: int, capability: int, group_size: int = 128) -> MatmulTile | None:
    """The tile for this many rows of x; None is to make the weight dense and multiply."""
    table = architecture(capability)
    assert table is not None
    tiles = SHORT_GROUP_TILES if 0 < group_size <= SHORT_GROUP else table.tiles
    return next((tile for tile in tiles if rows <= tile.max_rows), None)


@lru_cache(maxsize=4096)
def choose_splits(out_tiles: int, blocks_k: int, tile: MatmulTile, capability: int) -> int:
    """Among how many programs the inputs of an output tile are divided.

    Args:
        out_tiles: of TILE_N features.
        blocks_k: blocks of inputs.
        tile: the kernel's.
        capability: compute capability.
    """
    table = architecture(capability)
    assert table is not None
    programs = -(-out_tiles * TILE_N // tile.block_n) * -(-tile.max_rows // tile.block_m)

    def cost(splits: int) -> float:
        each = -(-blocks_k // splits) + OVERHEAD_BLOCKS * (1 if splits == 1 else 2)
        per_sm = programs * splits / table.num_sms
        # Too few programs leave memory idle; beyond that, the busiest SM sets the time.
        return -(-programs * splits // table.num_sms) * each * max(1.0, tile.resident / per_sm)

    def fits(splits: int) -> bool:
        if splits == 1:
            return True
        floats = programs * splits * tile.block_n * tile.block_m
        enough = blocks_k // splits >= LEAST_BLOCKS
        return enough and floats <= WORKSPACE_FLOATS and programs <= MAX_COUNTERS

    return min(filter(fits, SPLITS), key=cost)
