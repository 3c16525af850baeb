"""Names the launches of the packed matmul that are worth timing, see `gpu.timed`.

These are the tile of each entry of its table and those of the entries beside it, the splits of the
fastest one, and up to how many rows codes are widened in registers. Imports no triton.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.gpu.target import target_of
from appliance.kernels.gpu.timed import LaunchChoice
from appliance.kernels.packed_matmul.slices import WIDENED_ROWS
from appliance.kernels.packed_matmul.tiles import MatmulTile, choose_tile, neighbours, tiles_of
from appliance.kernels.packed_matmul.variant import may_fold, tiling_group

if TYPE_CHECKING:
    from appliance.kernels.gpu.timed import TimedChoices
    from appliance.kernels.packed_matmul.launch import TiledLinear

DENSE_ROWS = (256, 512, 1024, 2048)  # of x, for which dense slices are tried


@dataclass(frozen=True, slots=True)
class TimedLinear:
    """A linear with a tiled weight; see `Timeable`. Entries are rows of x."""

    linear: TiledLinear

    @property
    def name(self) -> str:
        form = self.linear.form
        gated = " gated" if form.gated else ""
        codes = f"{form.kind.value} {form.params_kind.value} {form.group_size}"
        return f"{form.out_features} x {form.in_features} {codes}{gated}"

    @property
    def has_splits(self) -> bool:
        return True

    def entries(self, most_rows: int) -> tuple[int, ...]:
        reached = [0, *(tile.max_rows for tile in self._table)]
        return tuple(rows for before, rows in pairwise(reached) if before < most_rows)

    def candidates(self, entry: int, best: LaunchChoice | None = None) -> tuple[LaunchChoice, ...]:
        """See `Timeable`; a tile that would round weights otherwise is left out."""
        if best is not None:
            splits = neighbours(*self.linear.splits_for(entry))
            return tuple(replace(best, splits=count) for count in splits)
        form, capability = self.linear.form, self._capability
        group, folds = tiling_group(form.kind, form.group_size), self._may_fold
        own = choose_tile(entry, capability, group, may_fold=folds)
        place = next(tile for tile in self._table if entry <= tile.max_rows)
        beside = neighbours(place, self._table)[1:]
        others = (
            replace(tile, max_rows=own.max_rows) for tile in beside if tile.folds == own.folds
        )
        return tuple(LaunchChoice(tile) for tile in dict.fromkeys((own, *others)))

    def library_rows(self, most_rows: int) -> tuple[int, ...]:
        tried = tuple(rows for rows in DENSE_ROWS if rows <= most_rows)
        return (WIDENED_ROWS, *tried) if tried else ()

    def use(self, timed: TimedChoices) -> None:
        self.linear.use(timed)

    def inputs(self, entry: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        return (torch.randn(entry, self.linear.in_features, dtype=dtype, device=device),)

    def run(self, *inputs: Any) -> object:
        return self.linear(*inputs)

    @property
    def _capability(self) -> int:
        return target_of(self.linear.weight.codes.device).capability

    @property
    def _may_fold(self) -> bool:
        return may_fold(self.linear.form.kind, self.linear.form.group_size)

    @property
    def _table(self) -> tuple[MatmulTile, ...]:
        form = self.linear.form
        group = tiling_group(form.kind, form.group_size)
        return tiles_of(self._capability, group, may_fold=self._may_fold)
