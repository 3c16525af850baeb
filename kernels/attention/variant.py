"""The compile-time choices of an attention kernel: phase, dtype, and tiles.

The sizes were chosen from compiled code alone, so that no register is spilled and the shared memory
of every architecture suffices; none has been timed on a GPU yet. Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch

from appliance.kernels.attention.work import FAN_IN, SPAN_COLUMNS
from appliance.kernels.kv_page.layout import DIM_STEP, PAGE_TOKENS, page_bytes, stored_dims

if TYPE_CHECKING:
    from appliance.kernels.cache.kv_format import KVFormat


# Triton's names of the dtypes that activations can have.
COMPUTE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# The kernels' names of codes, by format.
CODES = {"fp8": "fp8", "int8": "int8", "int4": "int4", "int4-sealed": "sealed"}
FP8_CAPABILITY = 89  # capability from which the hardware converts E4M3
FP8_FACTOR = 256.0  # factor left to multiply where bits are moved instead
WIDEST_WHOLE = 256  # head_dim whose queries and sums a warp can hold


class Phase(Enum):
    """The kind of work: programs divide keys in decode, and rows in prefill."""

    DECODE = "decode"  # few rows per sequence, its keys in spans
    PREFILL = "prefill"  # rows in tiles, each with all its keys


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile, warps and stages of one program."""

    block_m: int  # query rows times padded group
    block_n: int  # keys
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # per thread; None leaves the choice to ptxas

    @property
    def options(self) -> dict[str, int | None]:
        """The compiler's options."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "maxnreg": self.max_registers,
        }


@dataclass(frozen=True)
class Variant:
    """One specialization of an attention kernel.

    Attributes:
        phase: decode or prefill.
        kv_format: how the cache is stored.
        dtype: of query and output.
        group: query heads that share a KV head.
        head_dim: elements of a head.
        has_window: rows see their latest keys only.
        has_softcap: scores are capped.
        has_sinks: each head has a sink.
    """

    phase: Phase
    kv_format: KVFormat
    dtype: torch.dtype
    group: int
    head_dim: int
    has_window: bool = False
    has_softcap: bool = False
    has_sinks: bool = False

    @cached_property
    def group_padded(self) -> int:
        """Rows of a group in a prefill tile."""
        return padded(self.group)

    @property
    def is_in_parts(self) -> bool:
        """True if each warp has a part of a head's dimensions, see `parts_kernel`."""
        return self.head_dim > WIDEST_WHOLE

    def multiplies_codes(self, capability: int | None) -> bool:
        """Return True if tensor cores multiply E4M3 codes as they are, see `fp8_kernel`."""
        has_products = capability is not None and capability >= FP8_CAPABILITY
        is_fp8 = self.kv_format.value == "fp8" and self.dtype is not torch.float32
        is_prefill = self.phase is Phase.PREFILL
        return is_prefill and is_fp8 and has_products and not self.is_in_parts

    def constexprs(self, tile: Tile, capability: int | None) -> dict[str, object]:
        """Return the compile-time arguments; capability None is Triton's interpreter."""
        fp8 = capability is not None and capability >= FP8_CAPABILITY
        quantized = self.kv_format.is_quantized
        element = 4 if quantized else self.kv_format.storage_dtype.itemsize
        size = page_bytes(self.kv_format.value, self.head_dim)
        common: dict[str, object] = {
            "HAS_WINDOW": self.has_window,
            "HAS_SOFTCAP": self.has_softcap,
            "HAS_SINKS": self.has_sinks,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_STORED": stored_dims(self.kv_format.value, self.head_dim),
            "HEAD_DIM_PADDED": max(DIM_STEP, padded(self.head_dim)),
            "BLOCK_M": tile.block_m,
            "NUM_STAGES": tile.num_stages,
        }
        if self.multiplies_codes(capability):
            return common | {"PAGE_BYTES": size, "GROUP_PADDED": self.group_padded}
        common |= {
            "CODES": CODES.get(self.kv_format.value, "none"),
            "ASM": "none" if capability is None else "fp8" if fp8 else "ptx",
            # Codes are integers, exact in float16; in bfloat16 they would cost twice as much.
            "COMPUTE": "fp16"
            if quantized and self.dtype is not torch.float32
            else COMPUTE_NAMES[self.dtype],
            "PAGE_ELEMENTS": size // element,
            "OPEN_ELEMENTS": page_bytes("int8", self.head_dim) // 4,
            "FP8_FACTOR": 1.0 if fp8 else FP8_FACTOR,
            "PARTS": tile.num_warps if self.is_in_parts else 1,
            "BLOCK_N": tile.block_n,
        }
        if self.phase is Phase.PREFILL:
            return common | {"GROUP_PADDED": self.group_padded}
        # A thread merges four dimensions of a row.
        merged = min(tile.block_m, max(1, 128 * tile.num_warps // padded(self.head_dim)))
        return common | {
            "SPAN_COLUMNS": SPAN_COLUMNS,
            "FAN_IN": FAN_IN,
            "MERGE_ROWS": merged,
        }


def padded(size: int) -> int:
    """Return the next power of two: the sides of a tile must be one."""
    return 1 << (size - 1).bit_length()


# Three tiles per kind of work: for head_dim up to 64, 128 and 256. Decode takes a page at a time,
# of quantized pages with a single warp, for whose registers their order is made. Of five stages
# two bring block ids, so two pages are in flight while one is multiplied. A cap on registers keeps
# ptxas from spilling a few bytes to fit more programs, and from taking more instructions; a cap of
# 128 is for two programs of eight warps on a multiprocessor.
#
# In prefill the compiler gives each warp rows of its own if a tile has at least as many rows as a
# head has dimensions, so no part of a softmax goes through shared memory; with fewer rows all warps
# share them. Warpgroups always have rows of their own: there a tile of 64 leaves room for more
# programs, of which some widen codes while others multiply.
_Tiles = dict[tuple[Phase, bool], tuple[Tile, Tile, Tile]]  # bool: codes, not elements

_PAGE = PAGE_TOKENS
_MMA_SYNC: _Tiles = {
    (Phase.DECODE, False): (
        Tile(16, _PAGE, 2, 5, max_registers=255),
        Tile(16, _PAGE, 2, 5, max_registers=255),
        Tile(16, _PAGE, 4, 3, max_registers=255),
    ),
    (Phase.DECODE, True): (
        Tile(16, _PAGE, 1, 5, max_registers=208),
        Tile(16, _PAGE, 1, 5, max_registers=224),
        Tile(16, _PAGE, 2, 5, max_registers=255),
    ),
    (Phase.PREFILL, False): (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 32, 8, 3)),
    (Phase.PREFILL, True): (
        Tile(128, _PAGE, 8, 3),
        Tile(128, _PAGE, 8, 3, max_registers=255),
        Tile(64, _PAGE, 8, 3),
    ),
}
_WGMMA: _Tiles = {
    **_MMA_SYNC,
    (Phase.PREFILL, False): (
        Tile(128, 64, 8, 3),
        Tile(128, 32, 8, 4, max_registers=128),
        Tile(128, 32, 8, 3),
    ),
    (Phase.PREFILL, True): (Tile(128, _PAGE, 8, 3), Tile(64, _PAGE, 4, 3), Tile(64, _PAGE, 8, 2)),
}
_TABLES = {90: _WGMMA}
# Float32, for checks of the others, turns each product into three.
_FLOAT32: dict[Phase, tuple[Tile, Tile, Tile]] = {
    Phase.DECODE: (
        Tile(16, _PAGE, 4, 3),
        Tile(16, _PAGE, 8, 3),
        Tile(16, _PAGE, 8, 1),
    ),
    Phase.PREFILL: (Tile(16, _PAGE, 8, 2), Tile(16, _PAGE, 8, 2), Tile(16, _PAGE, 8, 1)),
}
# For head_dim 256: sealed and open pages in one program leave fewer registers.
_SEALED_PREFILL = Tile(32, _PAGE, 8, 3)
# For head_dim 512, whose parts the warps share out: of elements half a page at a time, as two pages
# would not fit. More rows of codes would not fit into the registers, nor would a block id that is
# brought a stage ahead of its page.
_IN_PARTS: dict[tuple[Phase, bool], Tile] = {
    (Phase.DECODE, False): Tile(16, _PAGE // 2, 4, 5, max_registers=255),
    (Phase.DECODE, True): Tile(16, _PAGE, 4, 5, max_registers=255),
    (Phase.PREFILL, False): Tile(32, _PAGE // 2, 8, 3, max_registers=255),
    (Phase.PREFILL, True): Tile(16, _PAGE, 8, 2, max_registers=255),
}


@lru_cache(maxsize=1024)
def choose_tile(variant: Variant, capability: int) -> Tile:
    """Return the tile for a variant on one compute capability (86 is 8.6)."""
    kind, is_wide = (variant.phase, variant.kv_format.is_quantized), variant.head_dim > 128
    if variant.is_in_parts:
        return _IN_PARTS[kind]
    if torch.float32 in (variant.dtype, _storage(variant.kv_format)):
        tiles = _FLOAT32[variant.phase]
    elif is_wide and variant.phase is Phase.PREFILL and variant.kv_format.is_sealed:
        return _SEALED_PREFILL
    else:
        tiles = _TABLES.get(capability, _MMA_SYNC)[kind]
    return tiles[2 if is_wide else 1 if variant.head_dim > 64 else 0]


def _storage(kv_format: KVFormat) -> torch.dtype | None:
    return None if kv_format.is_quantized else kv_format.storage_dtype
