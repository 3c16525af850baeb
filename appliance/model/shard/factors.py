"""Cuts a rank's part out of an adapter's factors; the ranks' products add up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.kernels.cpu.step_structs import AdapterPlace
from appliance.model.shard.mixer_ranges import input_ranges, output_columns
from appliance.model.shard.weights import middle_ranges
from appliance.model.spec import ExpertsSpec

if TYPE_CHECKING:
    from appliance.model.adapters.targets import Expansion, PlacedFactors
    from appliance.model.shard.shard import Shard
    from appliance.model.shard.split import Columns


@dataclass(frozen=True, slots=True)
class FactorCutter:
    """Cuts the factors of one model's places for one rank."""

    shard: Shard

    def cut(self, at: tuple[int, AdapterPlace], factors: PlacedFactors) -> PlacedFactors:
        """Return a rank's part of a place's factors: of its outputs, or of its inputs."""
        index, place = at
        if place in (AdapterPlace.INTO_MIXER, AdapterPlace.OUT_OF_MIXER):
            own = self._mixer(index)
        else:
            own = self._mlp(index)
        if own is None:
            return factors
        ranges, (first, last) = own
        if place in (AdapterPlace.INTO_MIXER, AdapterPlace.INTO_MLP):
            return replace(factors, expansions=_cut_outputs(factors.expansions, ranges))
        return replace(factors, shrink=factors.shrink[:, first:last].contiguous())

    def _mixer(self, index: int) -> tuple[list[Columns], Columns] | None:
        """Return a rank's outputs of the first linears, and inputs of the last one."""
        heads, mixer = self.shard.layers[index].heads, self.shard.whole.layers[index].mixer
        if heads is None or mixer is None:
            return None
        return input_ranges(mixer, heads), output_columns(mixer, heads)

    def _mlp(self, index: int) -> tuple[list[Columns], Columns] | None:
        share, mlp = self.shard.layers[index], self.shard.whole.layers[index].mlp
        if isinstance(mlp, ExpertsSpec):  # adapters change the shared MLP
            mlp, columns = mlp.shared, share.shared
        else:
            columns = share.columns
        if columns is None or mlp is None:
            return None
        width = mlp.intermediate_size
        return middle_ranges(width, width * (1 + mlp.gated), columns), columns


def _cut_outputs(expansions: tuple[Expansion, ...], ranges: list[Columns]) -> tuple[Expansion, ...]:
    """Return the expansions into ranges of a place's outputs, made adjacent."""
    found, begin = [], 0
    for first, last in ranges:
        for part in expansions:
            low = max(first, part.first_output)
            high = min(last, part.first_output + len(part.matrix))
            if low < high:
                rows = part.matrix[low - part.first_output : high - part.first_output]
                found.append(replace(part, matrix=rows, first_output=begin + low - first))
        begin += last - first
    return tuple(found)
