"""Tiles of the FP8 matmul, by compute capability and rows of x; see `packed_matmul.tiles`."""

from __future__ import annotations

from appliance.kernels.packed_matmul.tiles import MatmulTile

LEAST_NATIVE = 89  # compute capability from which tensor cores take e4m3

# With FP8 activations nothing is widened, so tiles are chosen for reuse, and like those of
# packed_matmul from compiled code alone.
_FEW = (MatmulTile(16, 16, 64, 4, 4), MatmulTile(64, 64, 64, 4, 4))
FP8_TILES = {
    89: (*_FEW, MatmulTile(1 << 30, 128, 128, 8, 3)),
    90: (*_FEW, MatmulTile(1 << 30, 128, 128, 8, 4)),
    120: (*_FEW, MatmulTile(1 << 30, 128, 128, 8, 3)),
}


def choose_fp8_tile(rows: int, capability: int) -> MatmulTile:
    """Choose the tile for a number of rows of x and a compute capability (89 is 8.9)."""
    elders = [elder for elder in FP8_TILES if elder <= capability]
    table = FP8_TILES[120 if capability > 90 else max(elders, default=LEAST_NATIVE)]
    return next(tile for tile in table if rows <= tile.max_rows)
