"""Names the launches of the FP8 matmul that are worth timing, see `gpu.timed`.

These are the tile of each entry of its table and those beside it, the splits of the fastest one,
and up to how many rows our kernel multiplies instead of the library's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.fp8_matmul.launch import MOST_OWN_ROWS, choose_fp8_tile, fp8_tiles_of
from appliance.kernels.gpu.target import target_of
from appliance.kernels.gpu.timed import LaunchChoice
from appliance.kernels.packed_matmul.tiles import neighbours

if TYPE_CHECKING:
    from appliance.kernels.fp8_matmul.launch import Fp8Linear
    from appliance.kernels.gpu.timed import TimedChoices

LIBRARY_ROWS = (128, 512, 2048)  # of x, for which the library is tried
MOST_TIMED_ROWS = 512  # of x, for an entry that has no end


@dataclass(frozen=True, slots=True)
class TimedFp8Linear:
    """A linear with FP8 weights and activations; see `Timeable`. Entries are rows of x."""

    linear: Fp8Linear

    @property
    def name(self) -> str:
        linear = self.linear
        scales = "blocks" if linear.weight.is_blockwise else "rows"
        return f"{linear.out_features} x {linear.in_features} fp8 by fp8, scales of {scales}"

    @property
    def has_splits(self) -> bool:
        return True

    def entries(self, most_rows: int) -> tuple[int, ...]:
        """See `Timeable`; our kernel has few rows only, if the library has the others."""
        weight = self.linear.weight.codes
        if self.linear.suits_library(torch.bfloat16, weight.device):
            most_rows = min(most_rows, MOST_OWN_ROWS)
        reached = [0, *(tile.max_rows for tile in fp8_tiles_of(self._capability))]
        return tuple(rows for before, rows in pairwise(reached) if before < most_rows)

    def candidates(self, entry: int, best: LaunchChoice | None = None) -> tuple[LaunchChoice, ...]:
        own = choose_fp8_tile(entry, self._capability)
        if best is not None:
            splits = neighbours(*self.linear.splits_for(own))
            return tuple(replace(best, splits=count) for count in splits)
        tried = neighbours(own, fp8_tiles_of(self._capability))
        tiles = dict.fromkeys(replace(tile, max_rows=own.max_rows) for tile in tried)
        return tuple(map(LaunchChoice, tiles))

    def library_rows(self, most_rows: int) -> tuple[int, ...]:
        tried = tuple(rows for rows in LIBRARY_ROWS if rows <= most_rows)
        if not tried or not self.linear.suits_library(
            torch.bfloat16, self.linear.weight.codes.device
        ):
            return ()
        return (MOST_OWN_ROWS, *tried)

    def use(self, timed: TimedChoices) -> None:
        self.linear.use(timed)

    def inputs(self, entry: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        rows = entry if entry <= LIBRARY_ROWS[-1] else MOST_TIMED_ROWS
        return (torch.randn(rows, self.linear.in_features, dtype=dtype, device=device),)

    def run(self, *inputs: Any) -> object:
        return self.linear(*inputs)

    @property
    def _capability(self) -> int:
        return target_of(self.linear.weight.codes.device).capability
