"""Tiles and compile-time choices of the grouped matmul. Imports no triton."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from torch import Tensor

from appliance.kernels.packed_matmul.tiles import SHORT_GROUP, MatmulTile
from appliance.kernels.packed_matmul.variant import constexprs_of, product_group

if TYPE_CHECKING:
    from appliance.kernels.gpu.timed import TimedChoices
    from appliance.kernels.packed_matmul.tiled import Codes, Params, TiledWeight

CHUNK = 256  # pairs that a program of the sort looks at together
DENSE_BLOCK_K = 64
# The arguments of `constexprs_of` that this kernel has.
_SHARED = (
    "CODES",
    "AXES",
    "WORDS",
    "TILE_K",
    "PARAMS",
    "OFFSETS",
    "RECORD",
    "GROUP",
    "SCALES",
    "EVEN_K",
    "BLOCK_M",
    "BLOCK_N",
    "BLOCK_K",
    "TILEWISE",
    "STAGES",
    "ASM",
)


# By an expert's average number of pairs; computed, none has been timed on a GPU yet.
TILES = (
    MatmulTile(8, 8, 64, 2, 4),
    MatmulTile(16, 16, 64, 2, 4),
    MatmulTile(32, 32, 128, 4, 3, tilewise=True),
    MatmulTile(64, 64, 128, 8, 3, tilewise=True, max_registers=168),
)


@lru_cache(maxsize=1024)
def choose_tile(num_pairs: int, num_experts: int) -> MatmulTile:
    """Choose by an expert's average number of pairs, which shapes alone decide."""
    average = -(-num_pairs // num_experts)
    return next((tile for tile in TILES if average <= tile.max_rows), TILES[-1])


def tile_of(num_pairs: int, num_experts: int, timed: TimedChoices | None) -> MatmulTile:
    """Return the tile that was timed for so many pairs, or else the one that is computed."""
    entry = choose_tile(num_pairs, num_experts)
    choice = None if timed is None else timed.entries.get(entry.max_rows)
    return entry if choice is None or choice.tile is None else choice.tile


def without_cap(tile: MatmulTile, kind: Codes, group_size: int) -> MatmulTile:
    """Return the tile for a packed weight: a cap on registers would spill sums of short groups."""
    is_short = 0 < product_group(kind, group_size) <= SHORT_GROUP
    return replace(tile, max_registers=None) if is_short else tile


def most_blocks(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the most blocks that pairs can fill: each expert's last one may hold a single pair."""
    chosen = min(num_pairs, num_experts)
    return (num_pairs + chosen * (block_m - 1)) // block_m


def grouped_constexprs(
    weight: TiledWeight | Tensor, tile: MatmulTile, in_features: int, *, asm: bool
) -> dict[str, object]:
    """Return the compile-time arguments of `grouped_matmul_kernel`, but for SHARE."""
    if isinstance(weight, Tensor):
        return dense_constexprs(tile, even_k=in_features % DENSE_BLOCK_K == 0)
    return packed_constexprs(
        weight.kind,
        weight.params_kind,
        weight.group_size,
        weight.block_k,
        tile,
        even_k=in_features % weight.block_k == 0,
        asm=asm,
    )


@cache
def packed_constexprs(
    kind: Codes,
    params_kind: Params,
    group_size: int,
    block_k: int,
    tile: MatmulTile,
    *,
    even_k: bool = True,
    asm: bool = True,
) -> dict[str, object]:
    """As `grouped_constexprs`, for a packed weight that need not exist."""
    found = constexprs_of(kind, params_kind, group_size, block_k, tile, even_k=even_k, asm=asm)
    return {name: value for name, value in found.items() if name in _SHARED}


@cache
def dense_constexprs(tile: MatmulTile, *, even_k: bool = True) -> dict[str, object]:
    """As `grouped_constexprs`, for a dense weight."""
    return {
        "CODES": "dense",
        "AXES": (),
        "WORDS": 0,
        "TILE_K": DENSE_BLOCK_K,
        "PARAMS": "none",
        "OFFSETS": False,
        "RECORD": 0,
        "GROUP": 0,
        "SCALES": 0,
        "EVEN_K": even_k,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": DENSE_BLOCK_K,
        "TILEWISE": False,
        "STAGES": tile.num_stages,
        "ASM": False,
    }
