"""The compile-time choices of the kernels of latent attention. Imports no triton.

The sizes were chosen from compiled code alone, so that no register is spilled and the shared memory
of every architecture suffices; none has been timed on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from appliance.kernels.attention.variant import (
    COMPUTE_NAMES,
    WIDEST_WHOLE,
    Phase,
    Tile,
    padded,
)
from appliance.kernels.attention.work import SPAN_COLUMNS
from appliance.kernels.kv_page.layout import (
    DIM_STEP,
    PAGE_TOKENS,
    layout_name,
    page_bytes,
    stored_dims,
)

if TYPE_CHECKING:
    from appliance.kernels.cache.kv_format import KVFormat

LEAST_DIMS = 16  # that a product sums
VALUE_WARPS = 8
VALUE_ROWS = 8  # of one head, whose partial results a program merges and maps
VALUE_BLOCK = 32  # elements of a value that a product gives
MERGED_AT_ONCE = 4
WRITE_WARPS = 4
MAP_FEW_ROWS = 16  # of one head, which a program maps; of more rows 64, or 32
MAP_BLOCK = 32  # elements of a query that a product sums

# Of five stages two bring block ids, so two tiles of tokens are in flight while one is multiplied.
# Queries stay in shared memory beside them. A cap on registers keeps ptxas from spilling a few
# bytes to fit more programs.
_FEW_HEADS = Tile(16, PAGE_TOKENS, 4, 5, max_registers=255)
_MANY_HEADS = Tile(32, PAGE_TOKENS, 4, 5, max_registers=255)
_PROMPT = Tile(64, PAGE_TOKENS, 8, 5)
# Rows of latents of 512: two pages would not fit beside them.
_WIDE = Tile(32, PAGE_TOKENS // 2, 4, 5, max_registers=255)
# A page of codes is widened in registers, of which four warps would have too few: for latents of
# up to `WIDEST_WHOLE` and many heads, and for the others.
_CODES = Tile(32, PAGE_TOKENS, 8, 5)
_FEW_CODES = Tile(16, PAGE_TOKENS, 8, 5)
CODES_AHEAD = {120: 4}  # stages where triton 3.6 would spill two words with five
# Float32, for checks of the others, turns each product into three.
_FLOAT32 = Tile(16, PAGE_TOKENS, 8, 1)
WIDEST_FLOAT32 = 128  # elements of a latent
WARPGROUPS = 90  # capability whose warpgroups multiply 64 rows, and whose shared memory has room


@dataclass(frozen=True, slots=True)
class LatentVariant:
    """One specialization of the kernels of latent attention.

    Attributes:
        kv_format: of the cache; one of `launch.FORMATS`.
        dtype: of query and output.
        num_heads: of a token.
        latent: elements of a token that are summed.
        rotary: elements that only score.
    """

    kv_format: KVFormat
    dtype: torch.dtype
    num_heads: int
    latent: int
    rotary: int

    @property
    def is_float32(self) -> bool:
        """True if products take three times as many instructions."""
        return torch.float32 in (self.dtype, self.kv_format.storage_dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of both products: codes of 8 bits are exact in float16, whatever the queries' dtype."""
        is_half = self.kv_format.is_quantized and self.dtype is not torch.float32
        return torch.float16 if is_half else self.dtype

    def tile(self, phase: Phase, capability: int) -> Tile:
        """Return the tile of a phase on one compute capability (86 is 8.6).

        In decode it follows from the heads alone: with other rows beside it, such as drafts, a row
        has the same sum.
        """
        if self.is_float32:
            return _FLOAT32
        is_wide = self.latent > WIDEST_WHOLE
        are_few = phase is Phase.DECODE and self.num_heads <= _FEW_HEADS.block_m
        if self.kv_format.is_quantized:
            if is_wide or are_few:
                return _FEW_CODES
            return replace(_CODES, num_stages=CODES_AHEAD.get(capability, _CODES.num_stages))
        if phase is Phase.PREFILL:
            return _WIDE if is_wide and capability != WARPGROUPS else _PROMPT
        if are_few:
            return _FEW_HEADS
        return _WIDE if is_wide else _MANY_HEADS

    def constexprs(self, phase: Phase, tile: Tile, *, is_interpreted: bool) -> dict[str, object]:
        """Return the compile-time arguments of a phase's kernel."""
        is_codes = self.kv_format.is_quantized
        half = (self.latent + self.rotary) // 2
        size = page_bytes(self.kv_format.value, half)
        fixed = self._widths | {
            "ASM": "none" if is_interpreted else "ptx",
            "COMPUTE": COMPUTE_NAMES[self.compute_dtype],
            "IS_CODES": is_codes,
            "PAGE_ELEMENTS": size // self.kv_format.storage_dtype.itemsize,
            "ROTARY": self.rotary,
            "ROTARY_PADDED": max(LEAST_DIMS, padded(self.rotary)),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "NUM_STAGES": tile.num_stages,
        }
        return fixed | ({"SPAN_COLUMNS": SPAN_COLUMNS} if phase is Phase.DECODE else {})

    def map_constexprs(self, plain: int, num_tokens: int) -> dict[str, object]:
        """Return the compile-time arguments of the kernel that maps queries, and its warps."""
        is_few = num_tokens <= MAP_FEW_ROWS
        # Queries of codes are scaled by their largest element: both are in registers at once.
        of_many = 2 if self.kv_format.is_quantized else 4
        return self._widths | {
            "PLAIN": plain,
            "ROTARY": self.rotary,
            "ROTARY_PADDED": max(LEAST_DIMS, padded(self.rotary)),
            "BLOCK_M": MAP_FEW_ROWS * (1 if is_few else of_many),
            "BLOCK_K": MAP_BLOCK,
            "STAGES": 2,
            "num_warps": 4 if is_few else 8,
        }

    def value_constexprs(self, value: int) -> dict[str, object]:
        """Return the compile-time arguments of the kernel that merges, and its warps."""
        merged = {"AT_ONCE": MERGED_AT_ONCE, "ROWS": VALUE_ROWS, "num_warps": VALUE_WARPS}
        return self._widths | {"VALUE": value, "BLOCK_V": VALUE_BLOCK} | merged

    def write_constexprs(self, rank: int) -> dict[str, object]:
        """Return the compile-time arguments of the kernel that writes tokens, and its warps."""
        half = (self.latent + self.rotary) // 2
        name = self.kv_format.value
        return self._widths | {
            "KV_FORMAT": layout_name(name, True),
            "ROTARY": self.rotary,
            "HALF_PADDED": max(DIM_STEP, padded(half)),
            "HALF_STORED": stored_dims(name, half),
            "PAGE_ELEMENTS": self._page_elements,
            "RANK_PADDED": padded(rank),
            "num_warps": WRITE_WARPS,
        }

    @property
    def _page_elements(self) -> int:
        half = (self.latent + self.rotary) // 2
        element = 1 if self.kv_format.is_quantized else self.kv_format.storage_dtype.itemsize
        return page_bytes(self.kv_format.value, half) // element

    @property
    def _widths(self) -> dict[str, object]:
        return {"LATENT": self.latent, "LATENT_PADDED": max(DIM_STEP, padded(self.latent))}
