"""Names the tiles of a layer's experts that are worth timing, see `gpu.timed`.

A tile sets the pairs of a block, so it is timed with the sort and with all linears of the experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.gpu.timed import LaunchChoice
from appliance.kernels.grouped_matmul.variant import TILES
from appliance.kernels.operations import ChosenExperts
from appliance.kernels.packed_matmul.tiled import TiledWeight
from appliance.kernels.packed_matmul.tiles import neighbours

if TYPE_CHECKING:
    from appliance.kernels.gpu.timed import TimedChoices
    from appliance.kernels.grouped_matmul.launch import ExpertMLPs, GroupedLinear


@dataclass(frozen=True, slots=True)
class TimedExperts:
    """The experts of a layer; see `Timeable`. Entries are the average pairs of an expert.

    Attributes:
        experts: that are here, the shared ones last.
        routed: that the router chooses from, here and elsewhere.
        top_k: of a row, without shared ones.
        shared: that every row takes.
    """

    experts: ExpertMLPs
    routed: int
    top_k: int
    shared: int

    @property
    def name(self) -> str:
        experts = self.experts
        linears = (experts.inner, experts.down, *([] if experts.up is None else [experts.up]))
        words = f"{experts.num_experts} of {self.routed} experts, {self.top_k} + {self.shared}"
        return ", ".join((f"{words} a row", *map(_in_words, linears)))

    @property
    def has_splits(self) -> bool:
        return False

    def entries(self, most_rows: int) -> tuple[int, ...]:
        reached = [0, *(tile.max_rows for tile in TILES)]
        most = -(-most_rows * self._pairs // self.experts.num_experts)
        return tuple(pairs for before, pairs in pairwise(reached) if before < most)

    def candidates(self, entry: int, best: LaunchChoice | None = None) -> tuple[LaunchChoice, ...]:
        own = next(tile for tile in TILES if entry <= tile.max_rows)
        tiles = (replace(tile, max_rows=entry) for tile in neighbours(own, TILES))
        return tuple(map(LaunchChoice, tiles)) if best is None else (best,)

    def library_rows(self, most_rows: int) -> tuple[int, ...]:
        return ()

    def use(self, timed: TimedChoices) -> None:
        self.experts.timed.take(timed)

    def inputs(self, entry: int, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
        """Return rows whose experts are as likely as any others; the same for each candidate."""
        rows = max(1, entry * self.experts.num_experts // self._pairs)
        random = torch.Generator(device).manual_seed(0)
        scores = torch.rand(rows, self.routed, device=device, generator=random)
        ids = scores.topk(self.top_k, dim=1).indices
        always = self.experts.num_experts - self.shared + torch.arange(self.shared, device=device)
        ids = torch.cat((ids, always.expand(rows, -1)), dim=1)
        weights = torch.full(ids.shape, 1 / self._pairs, dtype=torch.float32, device=device)
        hidden = torch.randn(rows, self.experts.down.out_features, dtype=dtype, device=device)
        return hidden, ChosenExperts(ids, weights)

    def run(self, *inputs: Any) -> object:
        return self.experts(*inputs)

    @property
    def _pairs(self) -> int:
        return self.top_k + self.shared


def _in_words(linear: GroupedLinear) -> str:
    weight, rows = linear.weight, linear.out_features
    act = "" if linear.activation is None else " gated"
    if isinstance(weight, TiledWeight):
        codes = f"{weight.kind.value} {weight.params_kind.value} {weight.group_size}"
        return f"{rows} x {weight.in_features} {codes}{act}"
    return f"{rows} x {weight.shape[1]} {weight.dtype}{act}".replace("torch.", "")
