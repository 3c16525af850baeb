"""What is fixed when the attention kernel is compiled: the kind of work, and tile sizes for it.

The sizes were chosen from compiled code alone, so that no register is spilled and the shared
memory of every architecture suffices; none has been timed on a GPU yet. Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from appliance.kernels.kv_cache import KVFormat

# Triton's names of the dtypes that the matrix products can take.
COMPUTE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Phase(Enum):
    """What the programs divide among themselves."""

    DECODE = "decode"  # one row per sequence, its keys in spans
    PREFILL = "prefill"  # rows in tiles, each with all its keys


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program works on at a time, and with what."""

    block_m: int  # query rows times padded group
    block_n: int  # keys
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; None leaves the choice to ptxas


@dataclass(frozen=True)
class Variant:
    """One specialization of the attention kernel.

    Attributes:
        phase: decode or prefill.
        kv_format: how the cache is stored.
        dtype: of query and output, and what the matrix products take.
        group: query heads that share a KV head.
        head_dim: elements of a head.
        block_size: token slots of a block.
        has_window: whether rows see their latest keys only.
        has_softcap: whether scores are capped.
    """

    phase: Phase
    kv_format: KVFormat
    dtype: torch.dtype
    group: int
    head_dim: int
    block_size: int
    has_window: bool = False
    has_softcap: bool = False

    @cached_property
    def group_padded(self) -> int:
        """Rows that a group takes in a tile."""
        return padded(self.group)

    def constexprs(self, tile: Tile) -> dict[str, object]:
        """The compile-time arguments of `paged_attention_kernel`."""
        return {
            "KV_FORMAT": self.kv_format.value,
            "COMPUTE_DTYPE": COMPUTE_NAMES[self.dtype],
            "DECODE": self.phase is Phase.DECODE,
            "HAS_WINDOW": self.has_window,
            "HAS_SOFTCAP": self.has_softcap,
            "GROUP": self.group,
            "GROUP_PADDED": self.group_padded,
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_PADDED": padded(self.head_dim),
            "BLOCK_SIZE": self.block_size,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        }


def padded(size: int) -> int:
    """The next power of two, which the sides of a tile have to be."""
    return 1 << (size - 1).bit_length()


# Per kind of work three tiles: for head_dim up to 64, 128 and 256. With fewer than three stages
# the block table would not be read ahead, with five the keys and values run two tiles ahead. Where
# a cap on registers stands, ptxas would else spill a few bytes to fit more programs on an SM.
_Tiles = dict[tuple[Phase, bool], tuple[Tile, Tile, Tile]]  # bool: one byte per element

_MMA_SYNC: _Tiles = {
    (Phase.DECODE, False): (Tile(16, 32, 4, 5), Tile(16, 32, 4, 5), Tile(16, 32, 4, 3)),
    (Phase.DECODE, True): (Tile(16, 64, 4, 3, 128), Tile(16, 32, 4, 5), Tile(16, 32, 4, 3)),
    (Phase.PREFILL, False): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 32, 8, 3)),
    (Phase.PREFILL, True): (Tile(128, 32, 8, 3, 255), Tile(64, 32, 8, 3, 255), Tile(64, 32, 8, 3)),
}
_WGMMA: _Tiles = {
    **_MMA_SYNC,
    (Phase.PREFILL, False): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(128, 32, 8, 3)),
    (Phase.PREFILL, True): (Tile(128, 32, 8, 3), Tile(128, 32, 8, 3), Tile(64, 32, 8, 3)),
}
# Float32 is for checking the others: each product becomes three, and operands stand in registers
# twice, so that a quantized cache with head_dim above 128 spills about a hundred bytes.
_FLOAT32 = (Tile(16, 16, 4, 3), Tile(16, 32, 8, 3), Tile(16, 16, 8, 3))


@lru_cache(maxsize=1024)
def choose_tile(variant: Variant, capability: int) -> Tile:
    """The tile for a variant on one compute capability (86 is 8.6)."""
    if variant.dtype is torch.float32:
        tiles = _FLOAT32
    else:
        table = _WGMMA if capability // 10 == 9 else _MMA_SYNC
        tiles = table[variant.phase, variant.kv_format.storage_dtype.itemsize == 1]
    return tiles[0 if variant.head_dim <= 64 else 1 if variant.head_dim <= 128 else 2]
