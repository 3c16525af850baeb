"""Adapters for the CPU library: factors in tiles, and a table of slots."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.kernels.cpu.arena import Arena
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.step_structs import (
    AdapterPlace,
    AdapterStruct,
    ExpansionStruct,
    LowRankStruct,
)
from appliance.kernels.cpu.weights import WeightPacker
from appliance.model.adapters.targets import place_factors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from appliance.model.adapters.adapter import Adapter
    from appliance.model.adapters.targets import AdapterTarget, PlacedFactors


@dataclass(frozen=True, slots=True)
class NativeAdapter:
    """An adapter whose struct points into its arena."""

    struct: AdapterStruct
    arena: Arena

    @property
    def nbytes(self) -> int:
        return self.arena.nbytes


class NativeAdapterSlots:
    """Slots for the CPU library; see `AdapterSlots`.

    Args:
        targets: the linears that adapters may change.
        layers: of the model, first and one after the last that are here.
        cut: takes a rank's part out of factors; None for the whole model.

    Attributes:
        table: (count,) ap_adapter.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        targets: Mapping[str, AdapterTarget],
        layers: tuple[int, int],
        dtype: torch.dtype,
        count: int,
        cut: Callable[[tuple[int, AdapterPlace], PlacedFactors], PlacedFactors] | None = None,
    ) -> None:
        self.table = (AdapterStruct * count)()
        self._held: list[NativeAdapter | None] = [None] * count
        self._targets = targets
        self._layers = range(*layers)
        self._dtype = dtype
        self._cut = cut
        # An engine serves one thread at a time, and steps keep the model's busy.
        self._engine = NativeEngine(library, 1)

    def lay_out(self, adapter: Adapter) -> NativeAdapter:
        arena = Arena()
        packer = WeightPacker(self._engine, arena, self._dtype)
        placed = {
            at: factors
            for at, factors in place_factors(adapter, self._targets).items()
            if at[0] in self._layers
        }
        if self._cut is not None:
            placed = {at: self._cut(at, factors) for at, factors in placed.items()}
        places = [
            _low_rank(packer, placed.get((layer, place)))
            for layer in self._layers
            for place in AdapterPlace
        ]
        struct = AdapterStruct(
            places=packer.structs(LowRankStruct, places),
            most_ranks=max((len(factors.scales) for factors in placed.values()), default=0),
        )
        return NativeAdapter(struct, arena)

    def put(self, slot: int, laid_out: NativeAdapter | None) -> None:
        self._held[slot] = laid_out
        self.table[slot] = AdapterStruct() if laid_out is None else laid_out.struct


def _low_rank(packer: WeightPacker, factors: PlacedFactors | None) -> LowRankStruct:
    if factors is None:
        return LowRankStruct()
    expansions = [
        ExpansionStruct(packer.linear(part.matrix), part.first_output, part.first_rank)
        for part in factors.expansions
    ]
    return LowRankStruct(
        shrink=packer.linear(factors.shrink),
        scales=packer.floats(factors.scales),
        expansions=packer.structs(ExpansionStruct, expansions),
        num_expansions=len(expansions),
    )
